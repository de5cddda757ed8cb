"""Prepares a worker to run blocks in processes of their own."""

from __future__ import annotations

import atexit
import logging
import platform
import sys
import sysconfig
from typing import Any, TypeAlias

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.adapter_links import link_to
from tracewire_engine.protocol.block_host import HostSettings, ModuleOutline
from tracewire_engine.protocol.keys import (
    ADAPTERS,
    BLOB_THRESHOLD,
    BLOCK_STEP,
    BLOCK_TIMEOUT,
    BLOCKS,
    CODE_IMPORTS,
    LINK_ADDRESS,
)
from tracewire_engine.protocol.save_relay import Settings
from tracewire_engine.worker.parallel.rank_agreement import BlockKey

from .accounts import Accounts
from .answers import ModelAnswers
from .earlier_stages import EarlierStages
from .followed_blocks import FollowedBlocks
from .forwarded_blocks import ForwardedBlocks
from .hosted_blocks import HostedBlocks
from .pool import HostPool
from .rank_link import RankLink
from .reading import ModelPaths
from .relay_link import RelayLink
from .report_thread import ReportThread
from .stream_flags import CudaFlags
from .stream_visits import StreamVisits

__all__ = ["BlocksElsewhere", "hosted_blocks", "outline_of"]

logger = logging.getLogger("vllm.tracewire")

#: What a worker has in place of blocks: hosts, or the part of another rank or stage.
BlocksElsewhere: TypeAlias = HostedBlocks | FollowedBlocks | ForwardedBlocks

#: The share of a step's time after which a block is interrupted, before its host is.
_SHARE = 0.8

#: How many times a step's time the GPU waits at most for hosts, if nothing releases it, and how long beyond that.
_HELD, _HELD_S = 3.0, 5.0

#: How much longer than a block a host may take, in seconds: it also reads and encodes what the block has saved.
_GRACE_S = 5.0

#: Folders that a host may read: libraries, and what the kernel says of the host itself.
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/proc/self", "/dev/null", "/dev/urandom")


def outline_of(model: torch.nn.Module) -> list[ModuleOutline]:
    """The modules of a model as hosts see them, each behind the module that holds it."""
    first: dict[int, str] = {}
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        outline = ModuleOutline(path, type(module).__name__, _kind(module), _extra(module))
        if first.setdefault(id(module), path) != path:
            outline.same = first[id(module)]
        found.append(outline)
    return found


def _kind(module: torch.nn.Module) -> str:
    return "list" if isinstance(module, torch.nn.ModuleList) else ""


def _extra(module: torch.nn.Module) -> str:
    try:
        return str(module.extra_repr())[:1000]
    except Exception:  # of a module that cannot describe itself
        return ""


def _has_attention(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase) or "kv_cache" in vars(module)


def hosted_blocks(runner: Any) -> BlocksElsewhere | None:
    """The hosts of a worker's blocks; `None` if blocks run in the worker.

    Of tensor-parallel ranks, the first has the hosts and the others follow it. Of pipeline stages, the last has them
    and the others send it what blocks read there.
    """
    config = runner.vllm_config.additional_config
    if config.get(BLOCKS) != "host":
        return None
    model, ranks, address = runner.nnsight_model, runner.tracewire_ranks, config.get(LINK_ADDRESS) or ""
    stages = get_pp_group()
    paths = ModelPaths(outline_of(runner.get_model()), model.__dict__["_tracewire_layers"])

    def fail(request: str, failure: Failure) -> None:
        ranks.fail(BlockKey(request, ""), lambda: failure)

    others = None if ranks is None else RankLink(get_tp_group(), address)
    if not stages.is_last_rank:
        forwarded = ForwardedBlocks(model, Accounts(paths), stages, address, others, fail)
        _limit(forwarded.answers, runner)
        return forwarded
    earlier = EarlierStages(stages, address) if stages.world_size > 1 else None
    if others is not None and not others.first:
        if earlier is not None:
            earlier.close()
        return FollowedBlocks(model, others, fail, None if earlier is None else Accounts(paths))
    hosts = _hosts_of(runner, config, others, earlier)
    hosts.answers.inputs = runner.tracewire_inputs
    return hosts


def _hosts_of(
    runner: Any, config: dict[str, Any], others: RankLink | None, earlier: EarlierStages | None
) -> HostedBlocks:
    model = runner.nnsight_model
    interleaver = model.interleaver
    settings = HostSettings(
        modules=outline_of(runner.get_model()),
        layers=model.__dict__["_tracewire_layers"],
        sums=model.__dict__["_tracewire_sums"],
        taps=sorted(interleaver.taps),
        encoders=list(interleaver.encoders),
        vocabulary=runner.model_config.get_vocab_size(),
        threads=torch.get_num_threads(),
        block_timeout=config.get(BLOCK_TIMEOUT, 0.0),
        step_timeout=_SHARE * config.get(BLOCK_STEP, 5.0),
        imports=list(config.get(CODE_IMPORTS) or ()),
        blob_threshold=config.get(BLOB_THRESHOLD, 0),
        readable=sorted({*_READABLE, *filter(None, sys.path), *sysconfig.get_paths().values(), sys.prefix}),
    )
    address: str = config.get(LINK_ADDRESS) or ""
    timeout, step_s = settings.block_timeout, config.get(BLOCK_STEP, 5.0)
    # A block that can be interrupted has ended with an error at its own line before.
    patience_s = timeout + _GRACE_S if timeout else 0.0
    adapters: int = config.get(ADAPTERS, 1)
    pool = HostPool(settings)

    def start_relay() -> RelayLink:
        return RelayLink(pool.start_relay(), Settings(address, adapters))

    blobs = runner.tracewire_reporter.blobs
    reports = ReportThread(lambda: link_to(address, adapters), blobs, patience_s, start_relay)
    atexit.register(reports.close)
    pool.ahead()
    paths = ModelPaths(settings.modules, settings.layers, settings.taps)
    visits = None if others is not None or earlier is not None else _visits(model, reports, step_s)
    hosts = HostedBlocks(model, paths, pool, reports, step_s, others, earlier, visits)
    _limit(hosts.answers, runner)
    return hosts


def _visits(model: Any, reports: ReportThread, step_s: float) -> StreamVisits | None:
    # Other processors may show the GPU that the rows are there before they are.
    if model.device.type != "cuda" or torch.version.cuda is None or platform.machine() != "x86_64":
        return None
    try:
        return StreamVisits(CudaFlags(_HELD * step_s + _HELD_S), reports)
    except Exception:  # of a driver or a device that cannot do it
        logger.warning("the GPU cannot wait for the hosts of blocks, so the model's thread waits", exc_info=True)
        return None


def _limit(answers: ModelAnswers, runner: Any) -> None:
    """Set what blocks may call."""
    answers.most_rows = runner.vllm_config.scheduler_config.max_num_batched_tokens
    answers.holds_state = _has_attention
