"""How a harvest begins: the caller's options are checked, the place is opened, and a run is made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
import msgspec

from tracewire.capture.capture import ModelHandle
from tracewire.capture.intervention import Intervention
from tracewire.checks import check_count, check_seconds, check_text, shown
from tracewire.errors import TraceRejected
from tracewire.options import HarvestOptions, SamplingOptions, check_names
from tracewire.progress import HarvestProgress
from tracewire.submission import checked_block, checked_interventions
from tracewire.traces.large import as_dtype
from tracewire.traces.model import Model
from tracewire_bus.wire.messages import Block, DeclaredIntervention

from .datasets import Dataset
from .journal import Journal, digest
from .libraries import library
from .rows import Filters, readings
from .run import Plan, Run, Submits
from .stores import Store

__all__ = ["Client", "harvest"]

FORMATS = ("safetensors", "parquet")
#: The options that apply to each trace.
_OF_TRACE = ("deadline", "priority", "live", "edits", "max_attempts", "token_strings")


class Client(Submits, Protocol):
    """A client, as far as a harvest needs it."""

    @property
    def models(self) -> Any: ...


async def harvest(
    client: Client,
    model: ModelHandle | str,
    prompts: Any,
    interventions: Sequence[DeclaredIntervention],
    block: Intervention | Block | None,
    to: str | os.PathLike[str],
    options: HarvestOptions,
) -> HarvestProgress:
    """`Client.harvest`."""
    given: dict[str, Any] = {**options}
    check_names(given, HarvestOptions)
    filters = _filters(given, block)
    declared = checked_interventions(interventions)
    whole = checked_block(block)
    if whole is None and not declared:
        raise TraceRejected("interventions", "expected at least one that reads, or a block: nothing would be saved")
    storage = given.get("storage_options") or {}
    dataset = Dataset(prompts, column=given.get("column"), key=given.get("key"))
    _see_that_libraries_are_there(given)
    store = await anyio.to_thread.run_sync(partial(Store, to, storage))
    journal = Journal(store)
    patience = check_seconds("patience", given.get("patience", 300.0))
    there = await anyio.to_thread.run_sync(journal.exists)
    name = model.name if isinstance(model, ModelHandle) else check_text("model", model)
    # A continued harvest has run before, so its engines may be starting.
    served = await client.models.get(name, timeout=patience if there else 0.0)
    # A name of the library stands for one version in the whole harvest.
    declared, _ = await served._session.library.resolve(declared, served)
    plan = _plan(name, whole, declared, given, filters, served, patience)
    head = _head(plan, served, declared, given)
    remarks = {"tracewire": _version()}
    await anyio.to_thread.run_sync(partial(journal.open, head, remarks))
    return await Run(client, plan, dataset, journal, _reporter(given.get("progress"))).harvest()


def _plan(
    name: str,
    block: Block | None,
    declared: Sequence[Any],
    given: Mapping[str, Any],
    filters: Filters,
    served: Model,
    patience: float,
) -> Plan:
    sampling = {one: given[one] for one in given if one in getattr(SamplingOptions, "__optional_keys__")}  # noqa: B009
    if sampling.get("n", 1) != 1:
        raise TraceRejected("sampling.n", f"a harvest has one sequence a prompt, got {shown(sampling['n'])}")
    options = {"max_tokens": 1, "token_strings": True, **sampling}
    options |= {one: given[one] for one in _OF_TRACE if one in given}
    options["interventions"] = declared
    most = given.get("max_failures", 100)
    values = given.get("format", FORMATS[0])
    if values not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {shown(values)}")
    return Plan(
        model=name,
        block=block,
        options=options,
        readings=readings(declared, served.tree),
        filters=filters,
        values=values,
        concurrency=check_count("concurrency", given.get("concurrency", 32)),
        shard_bytes=check_count("shard_bytes", given.get("shard_bytes", 256 << 20)),
        shard_prompts=check_count("shard_prompts", given.get("shard_prompts", 1000)),
        patience=patience,
        max_failures=None if most is None else check_count("max_failures", most),
        retry_failed=bool(given.get("retry_failed", False)),
        repair=bool(given.get("repair", False)),
    )


def _filters(given: Mapping[str, Any], block: Any) -> Filters:
    positions = given.get("positions")
    if positions is not None and not isinstance(positions, slice):
        if isinstance(positions, str) or not isinstance(positions, Sequence) or not positions:
            raise TypeError(f"positions: expected integers or a slice, got {shown(positions)}")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in positions):
            raise TypeError(f"positions: expected integers or a slice, got {shown(positions)}")
        positions = tuple(positions)
    most = given.get("keep_top")
    filters = Filters(
        positions,
        check_count("every", given.get("every", 1)),
        None if most is None else check_count("keep_top", most),
        given.get("dtype"),
    )
    as_dtype(filters.dtype)
    if filters.by_position and block is not None:
        raise ValueError(
            "positions and every: expected declared interventions alone, since the positions of a block's saves are "
            "unknown; a block can leave out positions itself"
        )
    return filters


def _head(plan: Plan, served: Model, declared: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that identify a harvest. A place holds one harvest."""
    filters = plan.filters
    positions = filters.positions
    sampling = {one: value for one, value in plan.options.items() if one not in ("interventions", *_OF_TRACE)}
    head = {
        "model": plan.model,
        "revision": served.info.revision,
        "dtype": served.info.dtype,
        "interventions": [f"{one!r} {digest(msgspec.msgpack.encode(one))}" for one in declared],
        "block": None if plan.block is None else f"{plan.block.name} {_block_digest(plan.block)}",
        "sampling": sampling,
        "live": plan.options.get("live"),
        "edits": plan.options.get("edits"),
        "positions": repr(positions) if isinstance(positions, slice) else positions,
        "every": filters.every,
        "keep_top": filters.keep_top,
        "values": plan.values,
        "values_dtype": filters.dtype,
        "column": given.get("column"),
        "key": given.get("key"),
    }
    # As it is read again.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(head, enc_hook=_plain))
    return plain


def _plain(value: Any) -> Any:
    if hasattr(value, "tobytes"):
        return f"{value.dtype} {list(value.shape)} {digest(value.tobytes())}"
    return repr(value)


def _block_digest(block: Block) -> str:
    """A digest of what a block does, which does not depend on the file and the lines of its source."""
    helpers = [msgspec.structs.replace(one, filename="", first_line=1) for one in block.helpers]
    moved = msgspec.structs.replace(block, filename="", first_line=1, helpers=helpers)
    return digest(msgspec.msgpack.encode(moved, order="deterministic"))


def _see_that_libraries_are_there(given: Mapping[str, Any]) -> None:
    """Fail before the first prompt is run, and not at the first shard."""
    names = ["fsspec", "pyarrow", "pyarrow.parquet"]
    if given.get("format", FORMATS[0]) == "safetensors":
        names.append("safetensors.numpy")
    for name in names:
        library(name)


def _reporter(report: Any) -> Callable[[HarvestProgress], object] | None:
    if report is not None and not callable(report):
        raise TypeError(f"progress: expected a function of a HarvestProgress, got {shown(report)}")
    return report  # type: ignore[no-any-return]


def _version() -> str:
    from importlib.metadata import version

    return version("tracewire")
