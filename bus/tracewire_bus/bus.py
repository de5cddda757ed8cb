"""The bus: queues, traces' streams and the engines' registry, in one Redis.

`Bus` is what clients and engines open. Submissions go through a model's queue
(`submission_queue.py`); every trace has a stream of events that anyone reads from any position (`reader.py`) and the
engine that runs it appends to (`writer.py`); engines say what they serve under keys that expire.

While Redis is away, what may be done twice is tried again: reading and appending for as long as it takes, everything
else for as long as the bus is patient.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import anyio

from tracewire_bus.domain.limits import check_size, check_submission
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
from tracewire_bus.store.lifecycle import Watch
from tracewire_bus.store.memory import Memory
from tracewire_bus.store.queue_entries import QueueFull, Taken
from tracewire_bus.store.snapshots import Snapshots
from tracewire_bus.store.submission_queue import Queue
from tracewire_bus.store.trace_records import Records, TraceElsewhere, TraceEnded, TraceMissing
from tracewire_bus.store.watch_groups import Groups, GroupWatch
from tracewire_bus.transport.errors import BusError, BusFull, BusUnavailable, NotAllowed, as_bus_error, is_transient
from tracewire_bus.transport.guard import Guard
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.pool import Connections
from tracewire_bus.transport.server import SCHEMES
from tracewire_bus.transport.urls import parsed, redacted
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.live_values import unpack_live
from tracewire_bus.wire.messages import Submission

from .recovery import Recovery

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
#: How long opening connections ahead may take, in seconds.
_WARM_S: Final = 1.0


class Bus:
    """One process's end of the bus: `async with Bus.open(url) as bus`.

    It owns one task and the connections; both end with its context. `aclose` may be called from another task than the
    one that entered.
    """

    def __init__(self, url: str, *, prefix: str, retention_s: float, patience_s: float) -> None:
        if parsed(url).scheme not in _SCHEMES:
            raise ValueError(
                f"a bus's URL begins with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}; got {redacted(url)!r}"
            )
        #: What other processes open to be on the same bus. For `embedded://`, known once the bus is open.
        self.url = url
        self.keys = Keys(prefix)
        self._retention_s = retention_s
        self._patience_s = patience_s
        self._server: EmbeddedServer | None = None
        self._connections_: Connections | None = None
        self._reader: Reader | SlotReaders | None = None
        self._blobs: Blobs | None = None
        self._snapshots: Snapshots | None = None
        self._watches: weakref.WeakSet[Watch | GroupWatch] = weakref.WeakSet()
        self._edit_records: weakref.WeakSet[EditRecords] = weakref.WeakSet()
        self._records: Records | None = None
        self._queue: Queue | None = None
        self._dead_letters: DeadLetters | None = None
        self._leases: Leases | None = None
        self._registry: EngineRegistry | None = None
        self._memory: Memory | None = None
        #: Parses whatever is read from Redis, and counts what is malformed.
        self.guard = Guard()

    @classmethod
    def open(cls, url: str, *, prefix: str = "tw", retention_s: float = 3600.0, patience_s: float = 20.0) -> Self:
        """A bus on the Redis at `url`, connected when its context is entered.

        `url` is `redis://`, `rediss://` (TLS) or `unix://`; with `redis+sentinel://host:port,host:port/service` the
        master that sentinels name, with `redis+cluster://host:port,host:port` a cluster (either with `rediss`, too); or
        `embedded://` for a private server that lives as long as the bus. All keys begin with `prefix`. A trace that
        ends by this bus is kept for `retention_s` seconds then, unless an engine of its model has said how long. While
        Redis is away, requests wait for up to `patience_s` seconds before they raise `BusUnavailable`.

        Raises:
            ValueError: `url` has another scheme, or `prefix` has braces; on entering, an option that there is not.
            BusUnavailable: on entering; nothing answers there.
            BusError: on entering; Redis refuses us.
            EmbeddedServerError: on entering; no private server could be started.
        """
        return cls(url, prefix=prefix, retention_s=retention_s, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        if self._connections_ is not None:
            raise RuntimeError("the bus is open already")
        try:
            if parsed(self.url).scheme == "embedded":
                from tracewire_bus.transport.embedded import EmbeddedServer

                self._server = await EmbeddedServer.start().__aenter__()
                self.url = self._server.url
            connections = self._connections_ = Connections(self.url, patience_s=self._patience_s, guard=self.guard)
            await _check(connections)
            if connections.clustered:
                self._reader = SlotReaders(connections)
            else:
                self._reader = Reader(connections)
                self._reader.start()
            self._blobs = Blobs(connections.apart(), self.keys)
            self._snapshots = Snapshots(connections.apart(), self.keys)
            self._records = Records(connections, self.keys, self._retention_s)
            self._queue = Queue(connections, self.keys)
            self._dead_letters = DeadLetters(connections, self.keys)
            self._leases = Leases(connections, self.keys)
            self._registry = EngineRegistry(connections, self.keys)
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
        """Close every subscription and connection, and stop the embedded server.

        Idempotent; writers close by themselves.
        """
        reader, self._reader = self._reader, None
        parts = reader, *self._watches, *self._edit_records, self._queue, self._blobs, self._snapshots
        closing = *parts, self._connections_, self._server
        self._queue = self._blobs = self._snapshots = self._connections_ = self._server = None
        self._records = self._dead_letters = self._leases = self._registry = self._memory = None
        with anyio.CancelScope(shield=True):
            for part in closing:
                if part is not None:
                    await part.aclose()

    async def warm(self) -> None:
        """Open what a burst of traces would have to open in its midst: further connections for commands, and the
        reader's; and ask what it would ask first. What cannot be opened, or not soon, is opened when it is needed.
        """
        if not isinstance(self._reader, Reader):
            # On a cluster each slot has its own.
            return
        with anyio.move_on_after(_WARM_S):
            async with anyio.create_task_group() as group:
                group.start_soon(self._connections.warm)
                group.start_soon(self._reader.connect)
                group.start_soon(self._ask_ahead)

    async def _ask_ahead(self) -> None:
        with suppress(BusError):
            await self.memory.prefetch()

    @property
    def _connections(self) -> Connections:
        return _open(self._connections_)

    # --- submissions --------------------------------------------------------------------------------------------------

    async def submit(self, submission: Submission, limit: int | None = None, retention_s: float | None = None) -> None:
        """Queue a submission. A trace that was submitted before is not queued again.

        `limit` is how many may wait, as `Queue.put` counts; 0 or None: any number.
        `retention_s` is how long the model's engines keep a trace after its end, should it end before one has it.

        Raises:
            LimitExceeded: it is more than a submission may be.
            LiveError: its live parameters are none.
            QueueFull: too many wait.
            TraceElsewhere: a trace of this id was submitted to another model.
            BusFull: Redis has too little memory left. It was not queued, and may be submitted again later.
            TraceEnded: a trace of this id has ended, so long ago that its events are gone.
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away; it may have been queued, and can be submitted again.
        """
        check_submission(submission)
        data = encode(submission)
        check_size(len(data))
        model, trace = submission.model, submission.trace
        creation = self.records.create_command(submission, unpack_live(submission.live), retention_s)
        await self.memory.check_reserve()
        try:
            created, before = await self.queue.put(
                model,
                trace,
                data,
                client=submission.client,
                priority=submission.priority,
                lease="" if submission.detach else submission.lease,
                limit=limit,
                tries=submission.max_attempts,
                # Its record first: what is queued can be steered and cancelled.
                before=[creation],
            )
        except QueueFull:
            # It does not exist.
            await self.records.forget(trace, model)
            if await self._connections.command("EXISTS", self.keys.submitted(model, trace)):
                # But somebody queued the same one just now, and found our record.
                await self._connections.command(*creation)
            raise
        if isinstance(created, bytes):
            await self.queue.withdraw(model, trace)
            raise TraceElsewhere(f"trace {trace} was submitted to model {created.decode('utf-8', 'replace')!r}")
        if created and before:
            # It had a record once, and a queue entry: both went with what it left.
            await self.records.forget(trace, model)
            raise TraceEnded(f"trace {trace} has ended, and is forgotten but for its id")

    async def submitted(self, *traces: tuple[str, str]) -> set[str]:
        """Which of these traces, each after its model, were submitted, as far as Redis knows.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        if not traces:
            return set()
        marks = (("EXISTS", self.keys.submitted(model, trace)) for model, trace in traces)
        replies = await self._connections.commands(*marks)
        return {trace for (_, trace), reply in zip(traces, replies, strict=True) if reply}

    @property
    def registry(self) -> EngineRegistry:
        """The engines that serve, and what each of them serves."""
        return _open(self._registry)

    @property
    def dead_letters(self) -> DeadLetters:
        """Entries of all queues that no engine could answer."""
        return _open(self._dead_letters)

    @property
    def leases(self) -> Leases:
        """The leases of all clients."""
        return _open(self._leases)

    @property
    def memory(self) -> Memory:
        """How much memory Redis has left."""
        return _open(self._memory)

    @property
    def queue(self) -> Queue:
        """The models' queues."""
        return _open(self._queue)

    @property
    def blobs(self) -> Blobs:
        """The large arrays of traces, over connections of their own."""
        return _open(self._blobs)

    @property
    def snapshots(self) -> Snapshots:
        """Traces' states at an event, and the trimming of their streams, over connections of their own."""
        return _open(self._snapshots)

    # --- standing interventions ---------------------------------------------------------------------------------------

    @property
    def edits(self) -> Edits:
        """What is installed on all engines of a model."""
        return Edits(self._connections, self.keys)

    def edit_records(self, model: str, edit: str, since: str = "now") -> EditRecords:
        """Follow what an edit leaves on requests that are no traces: see `Edits.records`. Whoever asks closes it.

        Raises:
            ValueError: `since` is no place to begin at.
        """
        records = self.edits.records(model, edit, since)
        self._edit_records.add(records)
        return records

    # --- traces -------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> Records:
        """What the bus knows of each trace, and what can be asked of one: steering, cancelling, deadlines, leases."""
        return _open(self._records)

    @property
    def retention_s(self) -> float:
        """How long a trace that ends by this bus is kept, in seconds, where its engines said nothing else."""
        return self._retention_s

    @property
    def patience_s(self) -> float:
        """How long requests wait while Redis is away, in seconds."""
        return self._patience_s

    @property
    def finished(self) -> Finished:
        """All finished traces, and the bounds over them."""
        return Finished(self._connections, self.keys)

    def link(self) -> Link:
        """A connection of one's own, which waits behind nobody's calls. Whoever asks drops it."""
        return self._connections.link()

    async def cancel(self, trace: str, *, by: str, reason: str = "") -> None:
        """Have a trace end as `cancelled`: its engine is asked to, or, where none lives that runs it, it ends now.

        Raises:
            TraceEnded: it had ended before.
            TraceMissing: there is no such trace.
            BusUnavailable: Redis stayed away.
        """
        engine, model = await self.records.cancel(trace, by=by, reason=reason)
        if engine and not await self.registry.alive(engine):
            _, model = await self.records.cancel(trace, by=by, reason=reason, force=True)
        if model:
            await self.queue.withdraw(model, trace)

    async def sweep(self, tags: Sequence[str]) -> None:
        """End what is past its deadline and runs nowhere, among the traces of these hash tags.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        for trace, model in await self.records.sweep(tags):
            await self.queue.withdraw(model, trace)

    async def cancel_orphans(self, model: str, lease: str, *, by: str) -> None:
        """End what waits for `model` on a lease that is gone.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        for taken in await self.queue.withdraw_lease(model, lease):
            try:
                # Whatever its record says, nobody runs it: an engine that was lost, or left, has it no more.
                await self.records.cancel(taken.trace, by=by, reason="its submitter has gone", force=True)
            except (TraceEnded, TraceMissing):
                pass
            await self.queue.done(model, taken.trace)

    def control(self, engine: str) -> ControlReader | SlotControlReaders:
        """Reads what is asked of an engine's traces. Whoever asks closes it."""
        if self._connections.clustered:
            return SlotControlReaders(self._connections, self.keys, engine)
        return ControlReader(self._connections.link(), self.keys, engine, guard=self.guard)

    def writer(self, *, memory_patience_s: float = 60.0) -> Writer:
        """A writer of events, with a connection of its own: `async with bus.writer() as writer`.

        An event waits for `memory_patience_s` seconds for a Redis that is full. Close it before the bus.
        """
        self.blobs.keep()
        return Writer(
            self._connections,
            self.keys,
            self._retention_s,
            self.queue.settled,
            patience_s=memory_patience_s,
            before=self.blobs.repeat,
        )

    def read(self, trace: str, since: str = "start") -> Subscription:
        """Subscribe to a trace's entries: those after `since`, then what comes, up to the final one.

        `since` is `"start"`, `"now"` (after what is there when the subscription starts: see its `start`), or the id of
        an entry. A trace that does not exist is waited for; one that was there and is gone is a `StreamGone`. In place
        of entries that were trimmed comes a `Gap`, with the state after them.

        Raises:
            ValueError: `since` is nothing of that.
        """
        if self._reader is None:
            raise anyio.ClosedResourceError
        keys = self.keys
        return self._reader.subscribe(
            keys.events(trace), since, partial(self.snapshots.read, trace), keys.record(trace)
        )

    def watch(self, since: str = "now") -> Watch:
        """Follow what becomes of all traces, from `since` on: `"start"`, `"now"`, or a watch's position.

        Whoever asks closes it. It has a connection of its own.

        Raises:
            ValueError: `since` is nothing of that.
        """
        watch = Watch(self._connections, self.keys, since)
        self._watches.add(watch)
        return watch

    def watch_group(self, group: str, consumer: str, since: str = "now", idle_s: float = 60.0) -> GroupWatch:
        """Be one of the readers that share what becomes of all traces: see `GroupWatch`.

        Whoever asks closes it. It has a connection of its own.

        Raises:
            ValueError: `since` is nothing that a watch takes, a name is empty, or `idle_s` is not positive.
        """
        if not group or not consumer or not idle_s > 0:
            raise ValueError("a group and a consumer have names, and its consumers a positive time to be idle")
        watch = GroupWatch(self._connections, self.keys, group, consumer, since, idle_s)
        self._watches.add(watch)
        return watch

    @property
    def watch_groups(self) -> Groups:
        """The groups of readers of the firehose."""
        return Groups(self._connections, self.keys)

    async def tail_id(self, trace: str) -> str:
        """Id of a trace's last entry, `"0-0"` if there is none."""
        return await tail_id(self._connections, self.keys.events(trace))

    @property
    def broken_at(self) -> float:
        """When Redis last failed to answer this bus, by the event loop's clock; `-inf` if never."""
        return self._connections.broken_at

    def recovery(self, model: str) -> Recovery:
        """Looks after what engines that are gone had taken of a model's queue."""
        return Recovery(self, model)

    async def exists(self, trace: str) -> bool:
        """Whether a trace has been submitted or has events, and is not yet forgotten."""
        keys = self.keys.record(trace), self.keys.events(trace)
        return any(await self._connections.commands(*(("EXISTS", key) for key in keys)))

    # --- anything else ------------------------------------------------------------------------------------------------

    async def command(self, *command: Any) -> Any:
        """One Redis command and its raw reply, for tools. It is sent again if the connection breaks under it.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away.
        """
        return await self._connections.command(*command, alone=True)


def _open(part: T | None) -> T:
    """A part of a bus that is open."""
    if part is None:
        raise anyio.ClosedResourceError
    return part


def _port(url: str) -> str:
    """The option of `tracewire redis` that starts a Redis at `url`, if it can start one there."""
    parts = parsed(url)
    if parts.scheme != "redis" or parts.hostname not in ("localhost", "127.0.0.1"):
        return ""
    return f" --port {parts.port or 6379}"


async def _check(connections: Connections) -> None:
    """Whether Redis is there and lets us in. Asked once: whoever opens a bus wants to know."""
    try:
        (reply,) = await connections.once(("PING",))
    except Exception as error:
        if is_transient(error):
            hint = f"start one with `tracewire redis{_port(connections.url)}`, or pass the URL of one that runs"
            raise BusUnavailable(f"no Redis answers at {redacted(connections.url)}: {hint} ({error})") from error
        raise as_bus_error(error) from error
    if isinstance(reply, Exception):
        raise as_bus_error(reply)
