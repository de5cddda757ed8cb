"""The bus: the facade over all that Tracewire keeps in one Redis.

Clients and engines open a `Bus`. A client puts a submission onto the model's queue (`submission_queue.py`), and an
engine takes it. The engine appends events to the trace's stream (`writer.py`), and any process reads the stream from
any position (`reader.py`). Engines register themselves under keys that expire (`engine_registry.py`).

While Redis does not answer, commands are repeated: reads and appends without limit, all others for `patience_s`
seconds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, TypeVar, Unpack

import anyio

from tracewire_bus.bulk.reader import BulkReader
from tracewire_bus.bulk.stores import BulkStores
from tracewire_bus.events.appends import EntryTooLarge, Fenced
from tracewire_bus.events.reader import Reader, SlotReaders
from tracewire_bus.events.subscription import Entry, EventsLost, Gap, StreamGone, Subscription, tail_id
from tracewire_bus.events.writer import Writer
from tracewire_bus.store.blobs import Blobs
from tracewire_bus.store.control import ControlReader, SlotControlReaders
from tracewire_bus.store.dead_letters import DeadLetters
from tracewire_bus.store.edits import EditRecords, Edits
from tracewire_bus.store.engine_registry import EngineRegistry
from tracewire_bus.store.finished import Finished
from tracewire_bus.store.keys import Keys
from tracewire_bus.store.leases import Leases
from tracewire_bus.store.library import Library
from tracewire_bus.store.lifecycle import Watch
from tracewire_bus.store.memory import Memory
from tracewire_bus.store.proofs import Proofs
from tracewire_bus.store.queue_entries import QueueFull, Taken
from tracewire_bus.store.snapshots import Snapshots
from tracewire_bus.store.submission_queue import Queue
from tracewire_bus.store.trace_list import Place, TraceScan
from tracewire_bus.store.trace_records import Records, TraceEnded, TraceMissing
from tracewire_bus.store.vectors import Vectors
from tracewire_bus.store.watch_groups import Groups, GroupWatch
from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable, NotAllowed, as_bus_error, is_transient
from tracewire_bus.transport.guard import Guard
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.server import SCHEMES
from tracewire_bus.transport.urls import parse_url, redacted
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Submission

from .recovery import Recovery
from .submitting import submit

if TYPE_CHECKING:
    from tracewire_bus.transport.embedded import EmbeddedServer

__all__ = [
    "FINAL_ID",
    "Bus",
    "BusError",
    "BusFull",
    "BusUnavailable",
    "Entry",
    "EntryTooLarge",
    "EventsLost",
    "Fenced",
    "Gap",
    "Keys",
    "NotAllowed",
    "Queue",
    "QueueFull",
    "StreamGone",
    "Subscription",
    "Taken",
    "Writer",
]

logger = logging.getLogger("tracewire")

T = TypeVar("T")

_SCHEMES = (*SCHEMES, "embedded")
#: Longest time that `Bus.warm` takes, in seconds.
_WARM_S: Final = 1.0


class OpenOptions(TypedDict, total=False):
    """The keyword arguments of `Bus.open`, which `BusOptions` describes."""

    prefix: str
    retention_s: float
    patience_s: float
    read_interval_s: float | None


@dataclass(frozen=True, kw_only=True)
class BusOptions:
    """The options of a bus. All durations are in seconds.

    Attributes:
        prefix: the beginning of all keys; without braces.
        retention_s: how long Redis keeps a trace that this bus ends, unless an engine of the trace's model has set
            another time.
        patience_s: how long a command waits while Redis does not answer, before it raises `BusUnavailable`.
        read_interval_s: the least time between two reads of the traces' events; None for one that grows with the number
            of traces (`reader.py`).
    """

    prefix: str = "tw"
    retention_s: float = 3600.0
    patience_s: float = 20.0
    read_interval_s: float | None = 0.0


class Bus:
    """One process's connection to the bus: `async with Bus.open(url) as bus`.

    The bus owns the task that reads traces (on a cluster, one for each slot) and the connections. All end with its
    context. Any task may call `aclose`.
    """

    def __init__(self, url: str, options: BusOptions) -> None:
        if parse_url(url).scheme not in _SCHEMES:
            raise ValueError(
                f"a bus's URL begins with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}; got {redacted(url)!r}"
            )
        #: The URL for other processes. For `embedded://`, the private server's URL once the bus is open.
        self.url = url
        self.keys = Keys(options.prefix)
        self.proofs = Proofs(prefix=options.prefix)
        self._options = options
        self._server: EmbeddedServer | None = None
        self._connections_: Connections | None = None
        self._reader: Reader | SlotReaders | None = None
        self._blobs: Blobs | None = None
        self._vectors: Vectors | None = None
        self._snapshots: Snapshots | None = None
        self._bulk: BulkReader | None = None
        self._watches: weakref.WeakSet[Watch | GroupWatch] = weakref.WeakSet()
        self._edit_records: weakref.WeakSet[EditRecords] = weakref.WeakSet()
        self._records: Records | None = None
        self._queue: Queue | None = None
        self._dead_letters: DeadLetters | None = None
        self._leases: Leases | None = None
        self._registry: EngineRegistry | None = None
        self._memory: Memory | None = None
        #: Parses data from Redis, and counts malformed entries.
        self.guard = Guard()

    @classmethod
    def open(cls, url: str, **options: Unpack[OpenOptions]) -> Self:
        """A bus on the Redis at `url`, connected when its context is entered.

        Args:
            url: `redis://`, `rediss://` (TLS) or `unix://` for one server;
                `redis+sentinel://host:port,host:port/service` for the master that the sentinels name;
                `redis+cluster://host:port,host:port` for a cluster (both also with `rediss`); `embedded://` for a
                private server that ends with the bus.
            options: those of `BusOptions`.

        Raises:
            ValueError: `url` has another scheme, or `prefix` has braces; on entering: `url` has an unknown option.
            BusUnavailable: on entering: no Redis answers at `url`.
            BusError: on entering: Redis refuses the connection.
            EmbeddedServerError: on entering: the private server does not start.
        """
        return cls(url, BusOptions(**options))

    async def __aenter__(self) -> Self:
        if self._connections_ is not None:
            raise RuntimeError("the bus is open already")
        try:
            if parse_url(self.url).scheme == "embedded":
                from tracewire_bus.transport.embedded import EmbeddedServer

                self._server = await EmbeddedServer.start().__aenter__()
                self.url = self._server.url
            connections = self._connections_ = Connections(
                self.url, patience_s=self._options.patience_s, guard=self.guard
            )
            await _check(connections)
            if connections.clustered:
                self._reader = SlotReaders(connections, interval_s=self._options.read_interval_s)
            else:
                self._reader = Reader(connections, interval_s=self._options.read_interval_s)
                self._reader.start()
            self._blobs = Blobs(connections.unbatched(), self.keys)
            self._vectors = Vectors(connections, self.keys)
            self._bulk = BulkReader(BulkStores(connections, self.keys.bulk_store))
            self._snapshots = Snapshots(connections.unbatched(), self.keys, self._bulk)
            self._records = Records(connections, self.keys, self._options.retention_s, self.proofs)
            self._queue = Queue(connections, self.keys)
            self._dead_letters = DeadLetters(connections, self.keys)
            self._leases = Leases(connections, self.keys)
            self._registry = EngineRegistry(connections, self.keys, self.proofs)
            self._memory = Memory(connections)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all subscriptions, watches and connections, and stop the embedded server. Idempotent.

        Close writers and control readers before.
        """
        reader, self._reader = self._reader, None
        parts = reader, *self._watches, *self._edit_records, self._queue, self._blobs, self._vectors, self._snapshots
        closing = *parts, self._bulk, self._connections_, self._server
        self._queue = self._blobs = self._vectors = self._snapshots = self._bulk = None
        self._connections_ = self._server = None
        self._records = self._dead_letters = self._leases = self._registry = self._memory = None
        await _close(closing)

    async def warm(self) -> None:
        """Open connections ahead of a burst of traces, and fetch the figure that the first submission needs.

        A connection that fails, or that takes more than a second, is opened when it is needed.
        """
        if not isinstance(self._reader, Reader):
            # On a cluster each slot has a reader of its own.
            return
        with anyio.move_on_after(_WARM_S):
            async with anyio.create_task_group() as group:
                group.start_soon(self._connections.warm)
                group.start_soon(self._reader.connect)
                group.start_soon(self.memory.prefetch)

    @property
    def _connections(self) -> Connections:
        return _open(self._connections_)

    # --- submissions --------------------------------------------------------------------------------------------------

    async def submit(
        self, submission: Submission, limit: int | None = None, retention_s: float | None = None, *, owner: str = ""
    ) -> bool:
        """Create a trace's record and queue its submission. A trace id that was submitted before is not queued again.

        `limit` is how many entries may wait, as `Queue.put` counts them; None or 0 for any number. `retention_s` is how
        long Redis keeps the trace, in seconds, if the trace ends before an engine has it. `owner` is a random text by
        which the record says whose it is. Returns whether the record is this caller's: new, or of the same owner.

        Raises:
            LimitExceeded: the submission is too large, or has too many parts.
            LiveError: its live parameters are malformed.
            QueueFull: too many entries wait.
            SubmissionRefused: it exceeds a limit that the model's engines have published.
            TraceElsewhere: a trace of this id was submitted to another model.
            BusFull: Redis has too little memory left. Nothing was queued; the call may be repeated later.
            TraceEnded: a trace of this id has ended, and its events have expired.
            BusError: Redis refuses.
            BusUnavailable: Redis does not answer. The submission may have been queued; the call may be repeated.
        """
        return await submit(self, submission, limit, retention_s, owner)

    @property
    def registry(self) -> EngineRegistry:
        """The registry of engines."""
        return _open(self._registry)

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead-letter queue of all models."""
        return _open(self._dead_letters)

    @property
    def leases(self) -> Leases:
        """The leases of all clients."""
        return _open(self._leases)

    @property
    def memory(self) -> Memory:
        """The memory of Redis."""
        return _open(self._memory)

    @property
    def queue(self) -> Queue:
        """The queues of all models."""
        return _open(self._queue)

    @property
    def blobs(self) -> Blobs:
        """The large arrays of all traces, over connections of their own."""
        return _open(self._blobs)

    @property
    def vectors(self) -> Vectors:
        """The arrays that declared interventions of many traces refer to, over connections of their own."""
        return _open(self._vectors)

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of all traces, over connections of their own."""
        return _open(self._snapshots)

    @property
    def bulk(self) -> BulkReader:
        """The bulk stores, with saves of traces outside Redis."""
        return _open(self._bulk)

    @property
    def library(self) -> Library:
        """The named vectors and autoencoders of all clients."""
        return Library(self._connections, self.keys)

    # --- standing interventions ---------------------------------------------------------------------------------------

    @property
    def edits(self) -> Edits:
        """The standing interventions of all models."""
        return Edits(self._connections, self.keys, self.proofs)

    def edit_records(self, model: str, edit: str, since: str = "now") -> EditRecords:
        """Follow the saves of an edit on requests that are not traces: see `Edits.records`.

        Raises:
            ValueError: `since` is neither `"start"` nor `"now"` nor an entry's id.
        """
        records = self.edits.records(model, edit, since)
        self._edit_records.add(records)
        return records

    # --- traces -------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> Records:
        """The records of all traces: live parameters, cancellation, pauses, deadlines."""
        return _open(self._records)

    @property
    def retention_s(self) -> float:
        """How long Redis keeps a trace that this bus ends, in seconds, unless the trace's record says another time."""
        return self._options.retention_s

    @property
    def patience_s(self) -> float:
        """How long commands wait while Redis does not answer, in seconds."""
        return self._options.patience_s

    @property
    def finished(self) -> Finished:
        """The finished traces, and the bounds over them."""
        return Finished(self._connections, self.keys)

    def link(self) -> Link:
        """A new link with a connection of its own. The caller drops it."""
        return self._connections.link()

    async def cancel(self, trace: str, *, by: str, reason: str = "") -> None:
        """Cancel a trace. Asks the engine that runs the trace; if no live engine does, the trace ends at once.

        Raises:
            TraceEnded: the trace had ended before.
            TraceMissing: there is no such trace.
            BusUnavailable: Redis does not answer; the trace may have been cancelled.
        """
        engine, model = await self.records.cancel(trace, by=by, reason=reason)
        if engine and not await self.registry.alive(engine):
            _, model = await self.records.cancel(trace, by=by, reason=reason, force=True)
        if model:
            await self.queue.withdraw(model, trace)

    async def sweep(self, tags: Sequence[str]) -> None:
        """End the traces of these hash tags that are past their deadline and that no engine runs.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        for trace, model in await self.records.sweep(tags):
            await self.queue.withdraw(model, trace)

    async def cancel_orphans(self, model: str, lease: str, *, by: str) -> None:
        """End the traces that wait for `model` under a lease that has expired. `by` names the author.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        for taken in await self.queue.withdraw_lease(model, lease):
            try:
                # No engine runs a trace that waits, even if its record names one: that engine was lost or has left.
                await self.records.cancel(taken.trace, by=by, reason="its submitter has gone", force=True)
            except (TraceEnded, TraceMissing):
                pass
            await self.queue.done(model, taken.trace)

    def control(self, engine: str) -> ControlReader | SlotControlReaders:
        """A reader of the orders to an engine. The caller closes it."""
        if self._connections.clustered:
            return SlotControlReaders(self._connections, self.keys, engine)
        return ControlReader(self._connections.link(), self.keys, engine, guard=self.guard)

    def writer(self, *, memory_patience_s: float = 60.0) -> Writer:
        """A writer of events, with a connection of its own: `async with bus.writer() as writer`.

        If Redis has no memory left, an event waits for up to `memory_patience_s` seconds. Close the writer before the
        bus.
        """
        self.blobs.keep()
        return Writer(
            *(self._connections, self.keys, self._options.retention_s, self.queue.note_settled),
            patience_s=memory_patience_s,
            before=self.blobs.repeat,
        )

    def read(self, trace: str, since: str = "start") -> Subscription:
        """Subscribe to a trace's entries: those after `since`, then new ones, up to the final one.

        `since` is `"start"`, `"now"` (the stream's end when the subscription starts: see `Subscription.start`),
        `"recent"` (the last 32 entries at that time), or the id of an entry. The subscription waits for a trace that
        does not exist yet. If the trace has expired or was dropped, it raises `StreamGone`. In place of trimmed entries
        it yields a `Gap` with the state after them.

        Raises:
            ValueError: `since` is none of these.
        """
        if self._reader is None:
            raise anyio.ClosedResourceError
        keys, read = self.keys, partial(self.snapshots.read, trace)
        return self._reader.subscribe(keys.events(trace), since, read, keys.record(trace))

    def watch(self, since: str = "now") -> Watch:
        """Follow the lifecycle events of all traces from `since` on: `"start"`, `"now"`, or a watch's position.

        The watch has a connection of its own. The caller closes it.

        Raises:
            ValueError: `since` is none of these.
        """
        watch = Watch(self._connections, self.keys, since)
        self._watches.add(watch)
        return watch

    def watch_group(self, group: str, consumer: str, since: str = "now", idle_s: float = 60.0) -> GroupWatch:
        """Follow the lifecycle events of all traces as one reader of a group that shares them: see `GroupWatch`.

        Raises:
            ValueError: `since` is no position, a name is empty, or `idle_s` is not positive.
        """
        if not group or not consumer or not idle_s > 0:
            raise ValueError("group and consumer must not be empty, and idle_s must be positive")
        watch = GroupWatch(self._connections, self.keys, group, consumer, since, idle_s)
        self._watches.add(watch)
        return watch

    def list_traces(self, before: Place | None = None, *, id_prefix: str = "", most: int | None = None) -> TraceScan:
        """The traces that were submitted of late, the newest first: see `trace_list.py`."""
        return TraceScan(self._connections, self.keys, before, id_prefix=id_prefix, most=most)

    @property
    def watch_groups(self) -> Groups:
        """The groups of readers of lifecycle events."""
        return Groups(self._connections, self.keys)

    async def tail_id(self, trace: str) -> str:
        """Id of the last entry on a trace's stream, `"0-0"` if there is none."""
        return await tail_id(self._connections, self.keys.events(trace))

    @property
    def broken_at(self) -> float:
        """When Redis last did not answer, or was another server, by the event loop's clock; `-inf` if never."""
        return self._connections.broken_at

    def recovery(self, model: str) -> Recovery:
        """The recovery of a model's traces."""
        return Recovery(self, model)

    async def exists(self, trace: str) -> bool:
        """Whether a trace has a record or events, and neither has expired."""
        return bool(await self.records.existing([trace]))

    async def commands(self, *commands: tuple[Any, ...], within_s: float = 0.0) -> list[Any]:
        """The replies to commands of one round trip, which others may join for `within_s` seconds; see `command`."""
        return await self._connections.commands(*commands, within_s=within_s)

    async def command(self, *command: Any) -> Any:
        """Execute one Redis command and return the raw reply. Sent again if the connection breaks.

        Raises:
            BusError: Redis refuses, or (`BusUnavailable`) does not answer.
        """
        return await self._connections.command(*command, unbatched=True)


def _open(part: T | None) -> T:
    """The part, if the bus is open.

    Raises:
        anyio.ClosedResourceError: the bus is not open.
    """
    if part is None:
        raise anyio.ClosedResourceError
    return part


async def _close(parts: Sequence[Any]) -> None:
    """Close the parts of a bus that are open, in order, even when cancelled."""
    with anyio.CancelScope(shield=True):
        for part in parts:
            if part is not None:
                await part.aclose()


def _port(url: str) -> str:
    """The option of `tracewire redis` that starts a Redis at `url`; `""` if the command cannot start one there."""
    parts = parse_url(url)
    if parts.scheme != "redis" or parts.hostname not in ("localhost", "127.0.0.1"):
        return ""
    return f" --port {parts.port or 6379}"


async def _check(connections: Connections) -> None:
    """Check with one PING that Redis answers.

    Raises:
        BusUnavailable: Redis does not answer.
        BusError: Redis refuses.
    """
    try:
        (reply,) = await connections.execute_once(("PING",))
    except Exception as error:
        if is_transient(error):
            hint = f"start one with `tracewire redis{_port(connections.url)}`, or pass the URL of one that runs"
            raise BusUnavailable(f"no Redis answers at {redacted(connections.url)}: {hint} ({error})") from None
        raise as_bus_error(error) from error
    if isinstance(reply, Exception):
        raise as_bus_error(reply)
