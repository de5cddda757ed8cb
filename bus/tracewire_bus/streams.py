"""The bus: queues, traces' streams and the engines' registry, in one Redis.

[`Bus`][tracewire_bus.streams.Bus] is what clients and engines open. Submissions go through a model's queue, a stream
that engines read as one consumer group; every trace has a stream of events that anyone reads from any position
(`reader.py`) and the engine that runs it appends to (`writer.py`); engines say what they serve under keys that expire.

While Redis is away, what may be done twice is tried again: reading and appending for as long as it takes, everything
else for as long as the bus is patient.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

import anyio
import msgspec

from .blobs import Blobs
from .codec import decode_engine, encode, schema_text
from .connection import (
    Backoff,
    BusError,
    BusUnavailable,
    Connections,
    Link,
    as_bus_error,
    is_transient,
    redacted,
)
from .control import ControlReader
from .keys import FINAL_ID, Keys
from .live import parted
from .messages import EngineInfo, Submission
from .reader import Entry, Reader, Subscription, tail_id
from .records import REMEMBER_S, Records
from .writer import ENTRY_BYTES, GROUP, EntryTooLarge, Fenced, Writer

if TYPE_CHECKING:
    from .embedded import EmbeddedServer

__all__ = [
    "FINAL_ID",
    "Bus",
    "BusError",
    "BusUnavailable",
    "Entry",
    "EntryTooLarge",
    "Fenced",
    "Keys",
    "Subscription",
    "Taken",
    "Writer",
]

logger = logging.getLogger("tracewire")

_SCHEMES = ("redis", "rediss", "unix", "embedded")
#: How many dead letters are kept, about.
_DEAD_LETTERS: Final = 10_000

# The marker stands beside the queue, so that both are written or neither.
_SUBMIT = """
local known = redis.call('GET', KEYS[2])
if known then return known end
local id = redis.call('XADD', KEYS[1], '*', 'v', ARGV[1], 't', ARGV[2], 'd', ARGV[3])
redis.call('SET', KEYS[2], id, 'EX', ARGV[4])
return id
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A queue entry as it stands there. It may be anything: whoever took it decodes it.

    A submission's fields are `v` (its schema), `t` (its trace's id) and `d` (the encoded submission). `queued_at` is
    when it was queued, in seconds since the epoch by Redis's clock.
    """

    entry_id: str
    fields: dict[bytes, bytes]
    queued_at: float


class Bus:
    """One process's end of the bus: `async with Bus.open(url) as bus`.

    It owns one task and the connections; both end with its context. `aclose` may be called from another task than the
    one that entered.
    """

    def __init__(self, url: str, *, prefix: str, retention_s: float, patience_s: float) -> None:
        if urlsplit(url).scheme not in _SCHEMES:
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
        self._reader: Reader | None = None
        self._blobs: Blobs | None = None
        self._records: Records | None = None
        self._intakes: dict[tuple[str, str], _Intake] = {}

    @classmethod
    def open(cls, url: str, *, prefix: str = "tw", retention_s: float = 3600.0, patience_s: float = 20.0) -> Self:
        """A bus on the Redis at `url`, connected when its context is entered.

        `url` is `redis://`, `rediss://`, `unix://`, or `embedded://` for a private server that lives as long as the
        bus. All keys begin with `prefix`. A trace's stream is kept for `retention_s` seconds after its final event.
        While Redis is away, requests wait for up to `patience_s` seconds before they raise `BusUnavailable`.

        Raises:
            ValueError: `url` has another scheme.
            BusUnavailable: on entering; nothing answers there.
            BusError: on entering; Redis refuses us.
            EmbeddedServerError: on entering; no private server could be started.
        """
        return cls(url, prefix=prefix, retention_s=retention_s, patience_s=patience_s)

    async def __aenter__(self) -> Self:
        if self._connections_ is not None:
            raise RuntimeError("the bus is open already")
        try:
            if urlsplit(self.url).scheme == "embedded":
                from .embedded import EmbeddedServer

                self._server = await EmbeddedServer.start().__aenter__()
                self.url = self._server.url
            connections = self._connections_ = Connections(self.url, patience_s=self._patience_s)
            await _check(connections)
            self._reader = Reader(connections)
            self._reader.start()
            self._blobs = Blobs(self.url, self.keys, patience_s=self._patience_s)
            self._records = Records(connections, self.keys, self._retention_s)
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
        connections, self._connections_ = self._connections_, None
        blobs, self._blobs = self._blobs, None
        self._records = None
        server, self._server = self._server, None
        intakes = list(self._intakes.values())
        self._intakes.clear()
        with anyio.CancelScope(shield=True):
            if reader is not None:
                await reader.aclose()
            for intake in intakes:
                await intake.link.drop()
            if blobs is not None:
                await blobs.aclose()
            if connections is not None:
                await connections.aclose()
            if server is not None:
                await server.aclose()

    @property
    def _connections(self) -> Connections:
        if self._connections_ is None:
            raise anyio.ClosedResourceError
        return self._connections_

    # --- submissions --------------------------------------------------------------------------------------------------

    async def submit(self, submission: Submission) -> str:
        """Queue a submission and return its entry's id. A trace that was submitted before is not queued again.

        Raises:
            EntryTooLarge: it is larger than an entry may be.
            LiveError: its live parameters are none.
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away; it may have been queued, and can be submitted again.
        """
        data = encode(submission)
        if len(data) > ENTRY_BYTES:
            raise EntryTooLarge(f"the submission takes {len(data)} bytes, an entry holds {ENTRY_BYTES}")
        model, trace = submission.model, submission.trace
        # Its record first: what is queued can be steered and cancelled.
        await self.records.create(submission, parted(submission.live))
        entry_id = await self._connections.command(
            *("EVAL", _SUBMIT, 2, self.keys.queue(model), self.keys.submitted(model, trace)),
            *(schema_text(), trace, data, REMEMBER_S),
        )
        return str(entry_id.decode())

    async def take(self, model: str, engine: str, count: int, block_ms: int) -> list[Taken]:
        """Up to `count` entries of a model's queue that no other engine has taken, waiting up to `block_ms` for the
        first.

        They stay `engine`'s until it calls `done` or `dead_letter`. What was taken by a call that was cancelled or
        lost its connection comes with a later one. While Redis is away it returns nothing. Not for concurrent use by
        one engine.
        """
        intake = self._intakes.get((model, engine))
        if intake is None:
            intake = self._intakes[model, engine] = _Intake(self._connections.link(), self.keys.queue(model), engine)
        return await intake.take(count, block_ms)

    async def done(self, model: str, entry_id: str) -> None:
        """Settle an entry: it leaves the queue.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        queue = self.keys.queue(model)
        await self._connections.commands(("XACK", queue, GROUP, entry_id), ("XDEL", queue, entry_id))
        self._settled(model, entry_id)

    def _settled(self, model: str, entry_id: str) -> None:
        queue = self.keys.queue(model)
        for intake in self._intakes.values():
            if intake.queue == queue:
                intake.claimed.discard(entry_id)

    async def dead_letter(self, model: str, taken: Taken, reason: str) -> None:
        """Move an entry that cannot be answered to the dead letters, with its fields, its model, its id and the reason.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        fields = [part for field in taken.fields.items() for part in field]
        await self._connections.command(
            *("XADD", self.keys.dead(), "MAXLEN", "~", _DEAD_LETTERS, "*"),
            *("model", model, "entry", taken.entry_id, "reason", reason[:1000], *fields),
        )
        await self.done(model, taken.entry_id)

    async def dead_count(self) -> int:
        """How many dead letters there are."""
        return int(await self._connections.command("XLEN", self.keys.dead()))

    @property
    def blobs(self) -> Blobs:
        """The large arrays of traces, over connections of their own."""
        if self._blobs is None:
            raise anyio.ClosedResourceError
        return self._blobs

    # --- traces -------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> Records:
        """What the bus knows of each trace, and what can be asked of one: steering, cancelling, deadlines, leases."""
        if self._records is None:
            raise anyio.ClosedResourceError
        return self._records

    def control(self, engine: str) -> ControlReader:
        """Reads what is asked of an engine's traces. Whoever asks closes it."""
        return ControlReader(self._connections.link(), self.keys, engine)

    def writer(self) -> Writer:
        """A writer of events, with a connection of its own: `async with bus.writer() as writer`.

        Close it before the bus.
        """
        return Writer(self._connections, self.keys, self._retention_s, self._settled)

    def read(self, trace: str, since: str = "start") -> Subscription:
        """Subscribe to a trace's entries: those after `since`, then what comes, up to the final one.

        `since` is `"start"`, `"now"` (after what is there when the subscription starts: see its `start`), or the id of
        an entry. A trace that does not exist is waited for.

        Raises:
            ValueError: `since` is nothing of that.
        """
        if self._reader is None:
            raise anyio.ClosedResourceError
        return self._reader.subscribe(self.keys.events(trace), since)

    async def tail_id(self, trace: str) -> str:
        """Id of a trace's last entry, `"0-0"` if there is none."""
        return await tail_id(self._connections, self.keys.events(trace))

    async def alive(self, engine: str) -> bool:
        """Whether an engine has renewed its entry in the registry of late."""
        return bool(await self._connections.command("EXISTS", self.keys.engine(engine)))

    async def exists(self, trace: str) -> bool:
        """Whether a trace has been submitted or has events, and is not yet forgotten."""
        return bool(await self._connections.command("EXISTS", self.keys.record(trace), self.keys.events(trace)))

    # --- anything else ------------------------------------------------------------------------------------------------

    async def command(self, *command: Any) -> Any:
        """One Redis command and its raw reply, for tools. It is sent again if the connection breaks under it.

        Raises:
            BusError: Redis refused it.
            BusUnavailable: Redis stayed away.
        """
        return await self._connections.command(*command)

    # --- registry -----------------------------------------------------------------------------------------------------

    async def register(self, info: EngineInfo, ttl_s: float = 5.0) -> None:
        """Say that an engine serves, for `ttl_s` seconds from now. Call it again before they are over.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        await self._connections.commands(
            ("SET", self.keys.engine(info.engine), encode(info), "PX", max(1, round(ttl_s * 1000))),
            ("SADD", self.keys.engines(), info.engine),
        )

    async def unregister(self, engine: str) -> None:
        """Say that an engine serves no more.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        await self._connections.commands(("DEL", self.keys.engine(engine)), ("SREM", self.keys.engines(), engine))

    async def engines(self) -> list[EngineInfo]:
        """The engines that serve now, by model, then by when they started.

        Raises:
            BusUnavailable: Redis stayed away.
        """
        names = [name.decode() for name in await self._connections.command("SMEMBERS", self.keys.engines())]
        if not names:
            return []
        found = await self._connections.commands(*(("GET", self.keys.engine(name)) for name in names))
        infos = []
        for name, data in zip(names, found, strict=True):
            if data is None:
                # Expired. Should it be back this very moment, its next heartbeat enters it again.
                await self._connections.command("SREM", self.keys.engines(), name)
                continue
            try:
                infos.append(decode_engine(data))
            except msgspec.MsgspecError as error:
                logger.warning("engine %s has registered something else than an engine: %s", name, error)
        return sorted(infos, key=lambda info: (info.model, info.started_at, info.engine))


class _Intake:
    """One engine's claims on one queue."""

    def __init__(self, link: Link, queue: str, engine: str) -> None:
        self.link = link
        self.queue = queue
        self._engine = engine
        #: Entries handed out and not settled yet.
        self.claimed: set[str] = set()
        #: Redis may hold claims of ours that were never handed out.
        self._lost = False
        self._backoff = Backoff()

    async def take(self, count: int, block_ms: int) -> list[Taken]:
        deadline = anyio.current_time() + block_ms / 1000
        while True:
            left_ms = max(0, round((deadline - anyio.current_time()) * 1000))
            try:
                if self._lost:
                    found = await self._read(count, "0", 0)
                    self._lost = len(found) == count
                    if found:
                        return found
                # Settled only once its reply is here: a call that is cancelled leaves claims behind.
                self._lost = True
                found = await self._read(count, ">", left_ms)
                self._lost = False
                self._backoff.reset()
                return found
            except Exception as error:
                if str(error).startswith("NOGROUP"):
                    await self._create_group()
                    continue
                if not is_transient(error):
                    raise as_bus_error(error) from error
                pause = self._backoff.next()
                logger.log(self._backoff.level, "the intake of %s waits for Redis: %s", self.queue, error)
                await anyio.sleep(min(pause, max(0.05, deadline - anyio.current_time())))
                if anyio.current_time() >= deadline:
                    return []

    async def _read(self, count: int, since: str, block_ms: int) -> list[Taken]:
        # Settled entries of ours are gone from the claims, so this many must hold one that was never handed out.
        limit = count if since == ">" else count + len(self.claimed)
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        (reply,) = await self.link.ask(
            ("XREADGROUP", "GROUP", GROUP, self._engine, "COUNT", limit, *block, "STREAMS", self.queue, since),
            timeout_s=block_ms / 1000 + 30,
        )
        if isinstance(reply, Exception):
            raise reply
        taken: list[Taken] = []
        for id_, flat in reply[0][1] if reply else ():
            entry_id = id_.decode()
            # One without fields was deleted while it was ours.
            if entry_id in self.claimed or len(taken) == count or flat is None:
                continue
            self.claimed.add(entry_id)
            taken.append(
                Taken(entry_id, dict(zip(flat[::2], flat[1::2], strict=True)), int(entry_id.partition("-")[0]) / 1000)
            )
        return taken

    async def _create_group(self) -> None:
        try:
            (reply,) = await self.link.ask(("XGROUP", "CREATE", self.queue, GROUP, "0", "MKSTREAM"))
        except Exception as error:
            if not is_transient(error):
                raise as_bus_error(error) from error
            return
        if isinstance(reply, Exception) and not str(reply).startswith("BUSYGROUP"):
            raise as_bus_error(reply)


async def _check(connections: Connections) -> None:
    """Whether Redis is there and lets us in. Asked once: whoever opens a bus wants to know."""
    try:
        (reply,) = await connections.once(("PING",))
    except Exception as error:
        if is_transient(error):
            raise BusUnavailable(f"no Redis answers at {redacted(connections.url)}: {error}") from error
        raise as_bus_error(error) from error
    if isinstance(reply, Exception):
        raise as_bus_error(reply)
