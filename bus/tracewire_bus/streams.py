"""Streams on Redis: where every key is named, and the only code that reads and writes them.

| key | holds |
| --- | --- |
| `<prefix>:queue:{<model>}` | submissions of a model; engines take them as one consumer group |
| `<prefix>:dead:{<model>}` | entries that could not be answered, with the reason |
| `<prefix>:{<tag>}:events:<trace>` | events of a trace, with explicit ids `<attempt>-<seq>` |
| `<prefix>:{<tag>}:queued:<trace>` | the queue entry of a trace: a submission counts once |
| `<prefix>:engines` | ids of engines, by when they were last seen |
| `<prefix>:engine:<id>` | what an engine serves; expires unless renewed |

A trace's keys share one of 64 hash tags, so that they stand on one shard of a cluster.

Everything is anyio but the transport: redis-py binds it to asyncio.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import anyio

from .codec import decode_engine, encode, schema_text
from .messages import EngineInfo, Submission

__all__ = ["FINAL_ID", "Bus", "Entry", "Fenced", "Keys", "Subscription", "Taken", "Writer"]

logger = logging.getLogger("tracewire.bus")

_MAX = (1 << 64) - 1
#: The id of a trace's final event: the greatest there is, so that Redis refuses whatever comes after it.
FINAL_ID = f"{_MAX}-{_MAX}"
#: Hash tags that the traces' keys are spread over.
TAGS = 64
GROUP = "engines"


class Fenced(Exception):
    """Redis refused an event's id: a later attempt, this very event, or the final is already on the stream."""


class Keys:
    """The names of all keys under one prefix."""

    def __init__(self, prefix: str = "tw") -> None:
        self.prefix = prefix

    def _tag(self, trace: str) -> str:
        return f"{{{zlib.crc32(trace.encode()) % TAGS:02d}}}"

    def queue(self, model: str) -> str:
        """Stream of a model's submissions."""
        return f"{self.prefix}:queue:{{{model}}}"

    def dead(self, model: str) -> str:
        """Stream of a model's dead letters."""
        return f"{self.prefix}:dead:{{{model}}}"

    def events(self, trace: str) -> str:
        """Stream of a trace's events."""
        return f"{self.prefix}:{self._tag(trace)}:events:{trace}"

    def queued(self, trace: str) -> str:
        """Marker of a trace's queue entry."""
        return f"{self.prefix}:{self._tag(trace)}:queued:{trace}"

    def engines(self) -> str:
        """Set of the engines' ids, scored by when they were last seen."""
        return f"{self.prefix}:engines"

    def engine(self, engine: str) -> str:
        """What one engine serves."""
        return f"{self.prefix}:engine:{engine}"


@dataclass(frozen=True)
class Entry:
    """One event as it stands on a trace's stream; `id` is `<attempt>-<seq>`, or `FINAL_ID`."""

    id: str
    data: bytes
    schema: str

    @property
    def final(self) -> bool:
        """Whether this is the last one."""
        return self.id == FINAL_ID


@dataclass(frozen=True)
class Taken:
    """A submission's entry as an engine took it, not yet decoded. `queued_at` is seconds by Redis's clock."""

    entry_id: str
    fields: dict[bytes, bytes]
    queued_at: float


class Bus:
    """A connection to the bus: submit and take, write and read, and the registry of engines.

    Made by `Bus.open`. `url` is what other processes connect to.
    """

    def __init__(self, redis: Any, url: str, keys: Keys, retention_s: float) -> None:
        self._redis = redis
        self.url = url
        self.keys = keys
        self._retention_s = retention_s
        self._reader = _Reader(redis)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, prefix: str = "tw", retention_s: float = 3600.0) -> AsyncIterator[Self]:
        """Connect to `redis://`, `rediss://`, `unix://`, or start a private server with `embedded://`.

        `retention_s` is how long a trace's keys stay after its final event.

        Raises:
            ConnectionError: nothing answers at `url`.
            ValueError: `url` is of no kind that is known.
        """
        import redis.asyncio as redis_asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import ExponentialWithJitterBackoff
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        async with AsyncExitStack() as stack:
            if url.startswith("embedded:"):
                from .embedded import EmbeddedServer

                server = await stack.enter_async_context(EmbeddedServer.start())
                url = server.url
            client = redis_asyncio.Redis.from_url(
                url,
                health_check_interval=30,
                socket_connect_timeout=10,
                retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries=3),
                retry_on_error=[RedisConnectionError, RedisTimeoutError],
            )
            stack.push_async_callback(client.aclose)
            try:
                await client.ping()
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                raise ConnectionError(f"no Redis answers at {url}: {error}") from error
            bus = cls(client, url, Keys(prefix), retention_s)
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(bus._reader.run)
            try:
                yield bus
            finally:
                bus._reader.close()
                group.cancel_scope.cancel()

    # --- submissions ------------------------------------------------------------------------------------------------

    async def submit(self, submission: Submission) -> str:
        """Put a submission on its model's queue, durable when this returns; a trace id counts once.

        Returns the queue entry's id, of the first submission if there was one under this trace id before.
        """
        marker = self.keys.queued(submission.trace)
        if not await self._redis.set(marker, b"", nx=True, ex=int(self._retention_s)):
            for _ in range(50):
                found = await self._redis.get(marker)
                if found:
                    return str(found.decode())
                if found is None:
                    return await self.submit(submission)
                await anyio.sleep(0.01)
        fields = {b"v": schema_text().encode(), b"t": submission.trace.encode(), b"d": encode(submission)}
        try:
            entry: bytes = await self._redis.xadd(self.keys.queue(submission.model), fields)
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await self._redis.delete(marker)
            raise
        await self._redis.set(marker, entry, ex=int(self._retention_s))
        return entry.decode()

    async def take(self, model: str, engine: str, count: int, block_ms: int) -> list[Taken]:
        """Take up to `count` submissions of a model, waiting up to `block_ms` milliseconds for the first."""
        from redis.exceptions import ResponseError

        queue = self.keys.queue(model)
        try:
            reply = await self._redis.xreadgroup(GROUP, engine, {queue: ">"}, count=count, block=block_ms)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            try:
                await self._redis.xgroup_create(queue, GROUP, id="0", mkstream=True)
            except ResponseError as exists:
                if "BUSYGROUP" not in str(exists):
                    raise
            return []
        taken = []
        for _, entries in _streams(reply):
            for entry_id, fields in entries:
                name = entry_id.decode()
                taken.append(Taken(name, fields, int(name.split("-")[0]) / 1000))
        return taken

    async def done(self, model: str, entry_id: str) -> None:
        """Take an entry off the queue for good."""
        queue = self.keys.queue(model)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(queue, GROUP, entry_id)
            pipe.xdel(queue, entry_id)
            await pipe.execute()

    async def dead_letter(self, model: str, taken: Taken, reason: str) -> None:
        """Put an entry that cannot be answered aside, with the reason, and off the queue."""
        fields = {**taken.fields, b"reason": reason.encode(), b"entry": taken.entry_id.encode()}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(self.keys.dead(model), fields, maxlen=10_000, approximate=True)
            pipe.xack(self.keys.queue(model), GROUP, taken.entry_id)
            pipe.xdel(self.keys.queue(model), taken.entry_id)
            await pipe.execute()

    async def dead_count(self, model: str) -> int:
        """How many dead letters a model has."""
        return int(await self._redis.xlen(self.keys.dead(model)))

    # --- events -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[Writer]:
        """A writer of events, for many traces at once. Leaving it waits for what was queued."""
        async with anyio.create_task_group() as group:
            writer = Writer(self._redis, self.keys, self._retention_s)
            group.start_soon(writer._run)
            try:
                yield writer
            finally:
                writer._close()

    def read(self, trace: str, since: str = "start") -> Subscription:
        """Read a trace's events: replay from `since`, then follow until the final.

        `since` is `"start"`, `"now"` (only what comes after this call), or an event's id, after which to go on.

        Raises:
            ValueError: `since` is none of these.
        """
        return Subscription(self._redis, self._reader, self.keys.events(trace), since)

    async def tail_id(self, trace: str) -> str | None:
        """Id of a trace's last event so far, or `None` if it has none."""
        last = await self._redis.xrevrange(self.keys.events(trace), count=1)
        return last[0][0].decode() if last else None

    async def exists(self, trace: str) -> bool:
        """Whether the bus knows a trace: it was submitted or has events, and has not expired."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(self.keys.events(trace))
            pipe.exists(self.keys.queued(trace))
            return any(await pipe.execute())

    # --- registry ---------------------------------------------------------------------------------------------------

    async def register(self, info: EngineInfo, ttl_s: float = 5.0) -> None:
        """Enter an engine into the registry, or renew it: without another call it expires after `ttl_s` seconds."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self.keys.engine(info.engine), encode(info), px=max(1, int(ttl_s * 1000)))
            pipe.zadd(self.keys.engines(), {info.engine: info.started_at})
            await pipe.execute()

    async def unregister(self, engine: str) -> None:
        """Take an engine out of the registry."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self.keys.engine(engine))
            pipe.zrem(self.keys.engines(), engine)
            await pipe.execute()

    async def engines(self) -> list[EngineInfo]:
        """The engines that live, the longest running first."""
        names = [name.decode() for name in await self._redis.zrange(self.keys.engines(), 0, -1)]
        if not names:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(self.keys.engine(name))
            found = await pipe.execute()
        gone = [name for name, data in zip(names, found, strict=True) if data is None]
        if gone:
            await self._redis.zrem(self.keys.engines(), *gone)
        return [decode_engine(data) for data in found if data is not None]


def _streams(reply: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """A reply of XREAD or XREADGROUP as `(key, entries)` pairs, under either protocol version of redis-py."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [(key, [entry for part in parts for entry in part]) for key, parts in reply.items()]
    return [(key, entries) for key, entries in reply]


@dataclass(eq=False)
class _Append:
    key: str
    entry_id: str
    data: bytes
    expire: list[str]
    done: anyio.Event = field(default_factory=anyio.Event)
    error: BaseException | None = None


class Writer:
    """Appends events; what many tasks append while one flush is on its way goes into the next, as one pipeline."""

    def __init__(self, redis: Any, keys: Keys, retention_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._retention_s = retention_s
        self._queue: deque[_Append] = deque()
        self._wake = anyio.Event()
        self._closed = False

    async def append(self, trace: str, attempt: int, seq: int, data: bytes, *, final: bool = False) -> None:
        """Append an event, and return when Redis has it. Queued before the first await, so calls keep their order.

        Raises:
            Fenced: Redis refused the id.
            ConnectionError: Redis could not be reached, after retries.
        """
        key = self._keys.events(trace)
        append = _Append(
            key,
            FINAL_ID if final else f"{attempt}-{seq}",
            data,
            [key, self._keys.queued(trace)] if final else [],
        )
        self._queue.append(append)
        self._wake.set()
        await append.done.wait()
        if append.error is not None:
            raise append.error

    def _close(self) -> None:
        self._closed = True
        self._wake.set()

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._closed:
                    return
                self._wake = anyio.Event()
                await self._wake.wait()
                continue
            batch, self._queue = self._queue, deque()
            await self._flush(batch)

    async def _flush(self, batch: deque[_Append]) -> None:
        from redis.exceptions import RedisError

        schema = schema_text().encode()
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for append in batch:
                    pipe.xadd(append.key, {b"v": schema, b"d": append.data}, id=append.entry_id)
                    for key in append.expire:
                        pipe.expire(key, int(self._retention_s))
                replies = iter(await pipe.execute(raise_on_error=False))
            for append in batch:
                reply = next(replies)
                for _ in append.expire:
                    next(replies)
                if isinstance(reply, Exception):
                    append.error = _append_error(append, reply)
        except (RedisError, OSError) as error:
            for append in batch:
                append.error = ConnectionError(f"events could not be written: {error}")
        finally:
            for append in batch:
                append.done.set()


def _append_error(append: _Append, error: Exception) -> Exception:
    text = str(error)
    if "equal or smaller" in text or "exhausted the last possible" in text:
        return Fenced(f"{append.key} refuses {append.entry_id}: {text}")
    return error


class Subscription:
    """A trace's entries, in order, each once: first what is there, then what comes, up to and with the final.

    An async iterator. It owns no task and no scope, so it may be entered in one task and closed in another. Its
    buffer is bounded; a reader that does not read is left behind by nobody and holds nobody up.
    """

    #: Entries held for a reader that has not asked for them yet.
    BUFFER = 256

    def __init__(self, redis: Any, reader: _Reader, key: str, since: str) -> None:
        if since not in ("start", "now") and not _is_id(since):
            raise ValueError(f"since is 'start', 'now' or an event's id '<attempt>-<seq>', not {since!r}")
        self._redis = redis
        self._reader = reader
        self.key = key
        self._since = since
        #: Id of the last entry handed out, or where it started from.
        self.position = "0-0" if since in ("start", "now") else since
        self._fetched = self.position
        self._buffer: deque[Entry] = deque()
        self._ready = anyio.Event()
        self._started = False
        self._closed = False
        self._error: BaseException | None = None

    def __aiter__(self) -> Self:
        return self

    async def start(self) -> None:
        """Settle where reading begins. `"now"` means the time of this call, which iterating makes if nobody did."""
        if self._started:
            return
        self._started = True
        if self._since == "now":
            last = await self._redis.xrevrange(self.key, count=1)
            if last:
                self.position = self._fetched = last[0][0].decode()
        if self.position == FINAL_ID:
            self._closed = True
        else:
            self._reader.add(self)

    async def __anext__(self) -> Entry:
        await self.start()
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._ready = anyio.Event()
            await self._ready.wait()
        entry = self._buffer.popleft()
        if len(self._buffer) == self.BUFFER // 2:
            self._reader.wake()
        self.position = entry.id
        if entry.final:
            self._closed = True
        return entry

    def drain(self) -> list[Entry]:
        """What has arrived and was not handed out yet."""
        entries = list(self._buffer)
        self._buffer.clear()
        return entries

    async def aclose(self) -> None:
        """Stop reading. Idempotent."""
        self._closed = True
        self._reader.remove(self)
        self._ready.set()

    # --- the reader's side ------------------------------------------------------------------------------------------

    @property
    def wants(self) -> bool:
        return len(self._buffer) < self.BUFFER

    @property
    def fetched(self) -> str:
        return self._fetched

    def deliver(self, entries: list[Entry]) -> None:
        for entry in entries:
            if _order(entry.id) <= _order(self._fetched):
                continue
            self._buffer.append(entry)
            self._fetched = entry.id
            if entry.final:
                self._reader.remove(self)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()


def _is_id(text: str) -> bool:
    parts = text.split("-")
    return len(parts) == 2 and all(part.isdigit() and int(part) <= _MAX for part in parts)


def _order(entry_id: str) -> tuple[int, int]:
    attempt, _, seq = entry_id.partition("-")
    return int(attempt), int(seq)


class _Reader:
    """Reads for all subscriptions of a bus over one connection.

    It waits in one XREAD for all streams that somebody wants more of. A new subscription cuts that wait short with
    CLIENT UNBLOCK from another connection.
    """

    #: Entries asked for of one stream at a time, and how long one wait lasts, in milliseconds.
    COUNT = 128
    BLOCK_MS = 5000

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._subscriptions: set[Subscription] = set()
        self._changed = anyio.Event()
        self._connection_id: int | None = None
        self._blocked = False
        self._wakes = anyio.Event()
        self._closed = False

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)
        self.wake()

    def remove(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def wake(self) -> None:
        """Have what is wanted looked at again."""
        self._changed.set()
        self._wakes.set()

    def close(self) -> None:
        self._closed = True
        for subscription in list(self._subscriptions):
            subscription.fail(RuntimeError("the connection to the bus was closed"))
        self._subscriptions.clear()

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._unblock)
            while True:
                await self._read_until_error()

    async def _unblock(self) -> None:
        """Cut the reader's wait short whenever something changed."""
        from redis.exceptions import RedisError

        while True:
            await self._wakes.wait()
            self._wakes = anyio.Event()
            while self._changed.is_set() and self._blocked and self._connection_id is not None:
                try:
                    await self._redis.execute_command("CLIENT", "UNBLOCK", self._connection_id)
                except (RedisError, OSError):
                    pass
                # It may not have been waiting yet when the command came: look again until it has noticed.
                await anyio.sleep(0.001)

    async def _read_until_error(self) -> None:
        from redis.exceptions import RedisError

        delay = 0.05
        try:
            # A client of its own connection: the pool's other connections stay free for commands.
            async with self._redis.client() as client:
                self._connection_id = await client.client_id()
                while True:
                    delay = 0.05
                    await self._read_once(client)
        except (RedisError, OSError) as error:
            self._connection_id = None
            self._blocked = False
            logger.warning("reading from Redis failed, trying again: %s", error)
            await anyio.sleep(delay * (1 + random.random()))

    async def _read_once(self, client: Any) -> None:
        self._changed = anyio.Event()
        wanted: dict[str, list[Subscription]] = {}
        for subscription in self._subscriptions:
            if subscription.wants:
                wanted.setdefault(subscription.key, []).append(subscription)
        if not wanted:
            await self._changed.wait()
            return
        positions = {key: min((s.fetched for s in subs), key=_order) for key, subs in wanted.items()}
        self._blocked = True
        try:
            reply = await client.xread(positions, count=self.COUNT, block=self.BLOCK_MS)
        finally:
            self._blocked = False
        for key, raw in _streams(reply):
            entries = [
                Entry(entry_id.decode(), fields.get(b"d", b""), fields.get(b"v", b"").decode("ascii", "replace"))
                for entry_id, fields in raw
            ]
            for subscription in wanted[key.decode()]:
                subscription.deliver(entries)
