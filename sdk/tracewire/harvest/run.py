"""A run of a harvest: submits the prompts and puts their saves into shards, until each prompt is in a shard.

A run has `concurrency` workers. A worker takes a prompt, submits it and waits for its trace. It hands the prompt's
rows, or its failure, to the one task that fills shards, and that task hands full shards to the one task that writes
them. No task buffers: each waits until the next one takes what it has. So if a store is slow, the workers submit no
more prompts. At most the rows of `concurrency` prompts and of three shards are in memory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from tracewire.errors import (
    BrokenStream,
    ClosedError,
    ConnectError,
    HarvestConflict,
    Overloaded,
    PermissionDeniedError,
    RetryableError,
    StateMismatch,
    TraceRejected,
    TracewireError,
    UnknownModel,
    UnknownTrace,
    ValueMissing,
)
from tracewire.progress import HarvestProgress
from tracewire.traces.failures import EngineLost, TraceCancelled

from .datasets import Dataset, Item
from .journal import Failed, Journal
from .rows import Filters, PromptRows, Reading, prompt_rows
from .shards import Shard, Signatures, described_files

__all__ = ["Plan", "Run", "Submits"]

#: How often a prompt is submitted whose trace was lost with a part of Redis, or cancelled because its client was slow.
_TRIES = 5
#: How long a worker waits before it submits a prompt again, in seconds.
_PAUSE_S = 0.2
_MOST_PAUSE_S = 5.0
#: Parts of a submission that belong to one prompt. An error in any other part concerns every prompt.
_OF_PROMPT = ("prompt", "prompts", "sampling", "multi_modal_data")


class Submits(Protocol):
    """A client, as far as it submits traces."""

    @property
    def trace(self) -> Callable[..., Any]: ...


@dataclass(frozen=True)
class Plan:
    """The parameters of a run, and its bounds.

    Attributes:
        values: the format of the values: `safetensors` or `parquet`.
        patience: how long the run goes on without any trace that ends while Redis or all engines are away, in seconds.
        max_failures: how many prompts may fail one after the other before the run ends; None for any number.
    """

    model: str
    block: Any
    options: Mapping[str, Any]
    readings: Sequence[Reading] = ()
    filters: Filters = field(default_factory=Filters)
    values: str = "safetensors"
    concurrency: int = 32
    shard_bytes: int = 256 << 20
    shard_prompts: int = 1000
    patience: float = 300.0
    max_failures: int | None = 100
    retry_failed: bool = False
    repair: bool = False


class Run:
    """One run of a harvest: `await Run(...).harvest()`."""

    def __init__(
        self,
        client: Submits,
        plan: Plan,
        dataset: Dataset,
        journal: Journal,
        report: Callable[[HarvestProgress], object] | None = None,
    ) -> None:
        self._client = client
        self._plan = plan
        self._dataset = dataset
        self._journal = journal
        self._report = report
        self._began = time.monotonic()
        self._progress = HarvestProgress(total=dataset.total)
        #: Since when Redis or the engines are away, by the clock of `time.monotonic`.
        self._away_since: float | None = None
        self._failures = 0
        self._signatures = Signatures()
        self._taking = anyio.Lock()

    async def harvest(self) -> HarvestProgress:
        """Run until every prompt of the data set is in a shard, or has failed.

        Raises:
            ShardDamaged: a shard of an earlier run is damaged, and `repair` is not set.
            TracewireError: the run cannot go on. Committed shards stay.
        """
        await self._begin()
        results_in, results = anyio.create_memory_object_stream[PromptRows | Failed](0)
        shards_in, shards = anyio.create_memory_object_stream[Shard](0)
        items = self._missing()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write, shards)
                group.start_soon(self._fill, results, shards_in)
                async with results_in:
                    for _ in range(self._plan.concurrency):
                        group.start_soon(self._work, items, results_in.clone())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            await items.aclose()
        await anyio.to_thread.run_sync(self._journal.sweep)
        return self._tell()

    async def _begin(self) -> None:
        journal = self._journal
        damaged = await anyio.to_thread.run_sync(journal.damaged)
        if damaged and not self._plan.repair:
            raise next(iter(damaged.values()))
        if damaged:
            await anyio.to_thread.run_sync(journal.drop, list(damaged))
        await anyio.to_thread.run_sync(journal.sweep)
        self._signatures.learn(journal)

    # --- tasks --------------------------------------------------------------------------------------------------------

    async def _missing(self) -> Any:
        """The prompts that are in no shard."""
        done, failed = self._journal.done, self._journal.failed
        # Copies: this run adds prompts to the journal, and it has read these from the data set already.
        before = {key: one.digest for key, one in failed.items()}
        skipped: dict[int | str, str] = {**before, **done} if not self._plan.retry_failed else dict(done)
        known = {**before, **done}
        async for item in self._dataset:
            if known.get(item.key, item.digest) != item.digest:
                raise HarvestConflict(
                    self._journal.store.url,
                    f"prompt {item.key!r} of the data set is another than was harvested "
                    "(take another place, or the data set as it was)",
                )
            if item.key in skipped:
                self._progress = msgspec.structs.replace(self._progress, skipped=self._progress.skipped + 1)
                continue
            yield item

    async def _work(self, items: AsyncIterator[Item], results: anyio.abc.ObjectSendStream[Any]) -> None:
        async with results:
            while True:
                async with self._taking:
                    item = await anext(items, None)
                if item is None:
                    return
                await results.send(await self._harvested(item))

    async def _fill(
        self, results: anyio.abc.ObjectReceiveStream[PromptRows | Failed], shards: anyio.abc.ObjectSendStream[Shard]
    ) -> None:
        async with results, shards:
            shard = Shard()
            async for one in results:
                shard.add(one)
                self._count(one)
                if shard.nbytes >= self._plan.shard_bytes or len(shard) >= self._plan.shard_prompts:
                    await shards.send(shard)
                    shard = Shard()
            if len(shard):
                await shards.send(shard)

    async def _write(self, shards: anyio.abc.ObjectReceiveStream[Shard]) -> None:
        async with shards:
            async for shard in shards:
                await anyio.to_thread.run_sync(partial(self._store, shard))
                self._progress = msgspec.structs.replace(self._progress, shards=self._progress.shards + 1)
                self._tell()

    def _store(self, shard: Shard) -> None:
        """Write a shard's files, and then its entry."""
        journal = self._journal
        entry, files = shard.contents(journal.shard_name(), self._plan.values)
        try:
            # Neither holds the interpreter up.
            with ThreadPoolExecutor(1) as beside:
                described = beside.submit(described_files, files)
                for name, pieces in files.items():
                    journal.store.put(name, *pieces)
                entry.files = described.result()
        except TracewireError:
            self._remove(files)
            raise
        try:
            journal.commit(entry)
        except HarvestConflict:
            # The number is another client's. After any other error the entry may be there, or still arrive: a sweep
            # removes the files later if it is not.
            self._remove(files)
            raise

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._journal.store.remove(name)

    # --- one prompt ---------------------------------------------------------------------------------------------------

    async def _harvested(self, item: Item) -> PromptRows | Failed:
        """The rows of a prompt, or its failure, after as many submissions as that takes.

        Raises:
            TracewireError: no prompt can be harvested.
        """
        pause, tries = _PAUSE_S, 0
        while True:
            try:
                rows = await self._traced(item)
                self._signatures.check(rows)
            except TracewireError as error:
                tries += not isinstance(error, RetryableError | UnknownModel)
                if (failed := self._failure(item, error, tries)) is not None:
                    return failed
                wait = error.retry_after if isinstance(error, Overloaded) else pause
            else:
                self._away_since = None
                self._failures = 0
                return rows
            await anyio.sleep(wait)
            pause = min(2 * pause, _MOST_PAUSE_S)

    async def _traced(self, item: Item) -> PromptRows:
        plan = self._plan
        async with self._client.trace(plan.model, item.prompt, plan.block, **plan.options) as trace:
            result = await trace.result()
            rows = await prompt_rows(item.key, item.digest, result, plan.readings, plan.filters)
            return replace(rows, row=item.row)

    def _failure(self, item: Item, error: TracewireError, tries: int) -> Failed | None:
        """The failure of a prompt, or None if the prompt is to be submitted again.

        Raises:
            TracewireError: it does not concern this prompt only, and does not pass.
        """
        if _passes(error):
            self._see_that_it_passes(error)
            return None
        if _is_lost(error) and tries < _TRIES:
            return None
        if not _is_own(error):
            raise error
        self._failures += 1
        if self._plan.max_failures is not None and self._failures >= self._plan.max_failures:
            error.add_note(f"{self._failures} prompts failed one after the other, the last was {item.key!r}")
            raise error
        return Failed(item.key, item.digest, type(error).__name__, str(error), getattr(error, "field", None) or "")

    def _see_that_it_passes(self, error: TracewireError) -> None:
        """Raise the error of a Redis or of engines that have been away for too long."""
        if isinstance(error, Overloaded):
            # Other clients have filled the queue: that is no reason to give up.
            return
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since > self._plan.patience:
            raise error

    # --- progress -----------------------------------------------------------------------------------------------------

    def _count(self, one: PromptRows | Failed) -> None:
        now = self._progress
        if isinstance(one, Failed):
            self._progress = msgspec.structs.replace(now, failed=now.failed + 1)
        else:
            tokens, nbytes = now.tokens + len(one.token_ids), now.bytes + one.nbytes
            self._progress = msgspec.structs.replace(now, prompts=now.prompts + 1, tokens=tokens, bytes=nbytes)
        self._tell()

    def _tell(self) -> HarvestProgress:
        total = self._dataset.total
        self._progress = msgspec.structs.replace(self._progress, seconds=time.monotonic() - self._began, total=total)
        if self._report is not None:
            self._report(self._progress)
        return self._progress


def _passes(error: TracewireError) -> bool:
    """Whether an error is of Redis or the engines and may pass. This excludes a trace that lost engine after engine."""
    return isinstance(error, RetryableError | UnknownModel) and not isinstance(error, EngineLost)


def _is_lost(error: TracewireError) -> bool:
    """Whether an error means that the trace was lost, so that a new trace of the prompt may succeed."""
    if isinstance(error, TraceCancelled):
        return error.reason == "its submitter has gone"
    return isinstance(error, BrokenStream | StateMismatch | UnknownTrace | ValueMissing)


def _is_own(error: TracewireError) -> bool:
    """Whether an error concerns this prompt only."""
    if isinstance(error, TraceRejected):
        return error.field.partition(".")[0].partition("[")[0] in _OF_PROMPT
    return not isinstance(error, ConnectError | ClosedError | PermissionDeniedError)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run, of those that its tasks ended with. A stream breaks when a task's end closes it."""
    _, others = errors.split((anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream))
    found = (others or errors).exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
