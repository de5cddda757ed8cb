"""Appending events to traces' streams.

Appends of many tasks share round trips: one flush is under way at a time, and the next takes all that was queued
meanwhile. An idle writer sends at once; a busy one sends fewer, larger pipelines.

The id that an event carries is its fence. Redis takes only an id greater than the stream's last, so a stale attempt, a
repeat, and anything after the final are refused by Redis itself. The writer sends a flush again when the connection
broke in its middle; an event that Redis had taken the first time is then refused too, and told by its bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self

import anyio

from .codec import schema_text
from .connection import Background, Backoff, BusError, Connections, Wakeup, as_bus_error, is_transient
from .firehose import TELL
from .keys import Keys, event_id
from .queue import settling
from .scripts import Script, with_text

__all__ = ["ENTRY_BYTES", "EntryTooLarge", "Fenced", "Writer"]

logger = logging.getLogger("tracewire")

#: What one entry may hold. Redis closes the connection on a string over 512 MB, and one of 100 MB stalls it.
ENTRY_BYTES: Final = 256 * 1024 * 1024
#: How long a trace that never ends is kept, in seconds, from its first event.
UNFINISHED_S: Final = 7 * 24 * 3600

_FLUSH_ENTRIES, _FLUSH_BYTES = 512, 8 * 1024 * 1024
#: The next flush begins no sooner than this after the last one began, in seconds: for each entry that it carried, and
#: at most. It leaves a busy publisher's loop half free, and what a trace puts out meanwhile shares an entry.
_PACE_S, _PAUSE_S = 100e-6, 8e-3
#: Larger data does not pass through Lua, which would copy it twice.
_INLINE_BYTES: Final = 64 * 1024
#: A pause that is not worth the timer.
_SHORT_S = 1e-3


# An event and what goes with it, which must not happen where the event is refused. The script begins with what even a
# Redis that is full does not refuse, so that an end can always be written. Without data ('' for the schema) the event
# was appended before, and this may be asked again. KEYS: events, blobs, record, changes, operations, snapshot,
# firehose. ARGV: id, schema, data, how long to keep the trace from now on or '', '1' if that is its end, the version of
# the last change that it tells of or '', then what the firehose is told of it, if anything.
_APPEND: Final = Script(
    TELL
    + """
redis.call('HDEL', KEYS[3], '')
if ARGV[2] ~= '' then
  local said = redis.pcall('XADD', KEYS[1], ARGV[1], 'v', ARGV[2], 'd', ARGV[3])
  if type(said) == 'table' and said.err then return said end
end
if ARGV[6] ~= '' then redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', ARGV[6]) end
if ARGV[4] ~= '' then
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
if ARGV[5] == '1' then
  redis.call('EXPIRE', KEYS[3], ARGV[4])
  redis.call('EXPIRE', KEYS[6], ARGV[4])
  redis.call('DEL', KEYS[4], KEYS[5])
end
if ARGV[7] then
  local known, told = unpack(redis.call('HMGET', KEYS[3], 'c', 'w'))
  if ARGV[2] ~= '' or told ~= ARGV[1] then tell(KEYS[7], 'c', known or '', unpack(ARGV, 7)) end
  if ARGV[2] == '' and known then redis.call('HSET', KEYS[3], 'w', ARGV[1]) end
end
return ARGV[1]
"""
)


class Fenced(BusError):
    """The stream has this event already, or a later one: of a newer attempt, or the final. Nothing was appended."""


class EntryTooLarge(BusError, ValueError):
    """More than one entry can hold."""


class _Append:
    """One event on its way, and what came of it."""

    __slots__ = ("data", "done", "id", "key", "more", "outcome")

    def __init__(
        self,
        key: str,
        id_: str,
        data: bytes,
        more: Callable[[str, bytes], tuple[Any, ...]] | None,
        done: tuple[Any, ...] | None,
        outcome: asyncio.Future[Exception | None],
    ) -> None:
        self.key = key
        self.id = id_
        self.data = data
        #: Makes the script's command that appends it and does what goes with it; without a schema, only the latter.
        self.more = more
        #: The command that settles its queue entry.
        self.done = done
        #: What it failed with, or None, once it has ended. Cancelled with whoever waits for it.
        self.outcome = outcome

    def end(self, error: Exception | None = None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(error)


class Writer:
    """Appends events for as long as its context is open: `async with bus.writer() as writer`."""

    def __init__(
        self, connections: Connections, keys: Keys, retention_s: float, settled: Callable[[str, str], None]
    ) -> None:
        self._settled = settled
        self._link = connections.link()
        self._keys = keys
        self._retention_s = max(1, round(retention_s))
        self._schema = schema_text()
        self._queue: deque[_Append] = deque()
        self._wanted = Wakeup()
        self._idle = Wakeup()
        self._flushing = False
        self._loop: asyncio.AbstractEventLoop
        self._task: Background | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = Background(self._run, "tracewire writer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send what is queued, for at most 2 seconds, and end. Appends that wait still get `ClosedResourceError`."""
        task, self._task = self._task, None
        if task is None:
            return
        with anyio.move_on_after(2, shield=True):
            while self._queue or self._flushing:
                await self._idle.wait()
        await task.aclose()
        await self._link.drop()
        while self._queue:
            self._queue.popleft().end(anyio.ClosedResourceError())

    def queue(
        self,
        trace: str,
        attempt: int,
        seq: int,
        data: bytes,
        final: bool = False,
        *,
        done: tuple[str, str, str] | None = None,
        told: int | None = None,
        life: Sequence[Any] | None = None,
    ) -> Coroutine[Any, Any, str]:
        """Queue an encoded event at once. Await what it returns for the event's id, when Redis has it.

        Events are numbered and queued in one order: call it for the next event of a trace before awaiting anything
        else. While Redis is away it waits. A cancelled append may still be carried out, so its number is spent.

        `final` gives it the greatest id of all and lets the trace expire, its blobs with it. `done`, a model, the trace
        of a queue entry and who holds it, settles that entry in the same round trip, if it is held so; also where the
        event is refused. `told` says that the event tells of all
        changes of live parameters up to that version. `life` is what the firehose is told of it, as `telling` makes it.

        Raises:
            Fenced: the stream holds this event or a later one.
            EntryTooLarge: `data` is larger than an entry may be.
            BusError: Redis refused it.
            anyio.ClosedResourceError: the writer is closed, or was before Redis had it.
        """
        if self._task is None:
            raise anyio.ClosedResourceError
        id_ = event_id(attempt, seq, final=final)
        if len(data) > ENTRY_BYTES:
            raise EntryTooLarge(f"event {attempt}-{seq} takes {len(data)} bytes, an entry holds {ENTRY_BYTES}")
        keys = self._keys
        key = keys.events(trace)
        more: Callable[[str, bytes], tuple[Any, ...]] | None = None
        if final or seq == 0 or told is not None or life is not None:
            names = (
                *(key, keys.blobs(trace), keys.record(trace), keys.changes(trace), keys.operations(trace)),
                *(keys.snapshot(trace), keys.firehose(keys.tag(trace))),
            )
            keep = self._retention_s if final else UNFINISHED_S if seq == 0 else ""
            end, version = "1" if final else "", "" if told is None else told

            def more(schema: str, data: bytes) -> tuple[Any, ...]:
                # With its text: what comes behind it in a pipeline must not overtake it.
                command = with_text(_APPEND(names, id_, schema, data, keep, end, version, *(life or ())))
                assert command is not None
                return command

        settle = None if done is None else settling(keys, *done)
        item = _Append(key, id_, data, more, settle, self._loop.create_future())
        self._queue.append(item)
        self._wanted.notify()
        return self._outcome(item, done)

    async def _outcome(self, item: _Append, done: tuple[str, str, str] | None) -> str:
        error = await item.outcome
        if error is not None:
            raise error
        if done is not None:
            self._settled(*done[:2])
        return item.id

    async def append(self, trace: str, attempt: int, seq: int, data: bytes, final: bool = False, **more: Any) -> str:
        """`queue`, and wait until Redis has it."""
        return await self.queue(trace, attempt, seq, data, final, **more)

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._idle.notify()
                await self._wanted.wait()
            batch = self._next_batch()
            self._flushing = True
            free = self._loop.time() + min(_PACE_S * len(batch), _PAUSE_S)
            try:
                await self._flush(batch)
                if (pause := free - self._loop.time()) > _SHORT_S and self._task is not None:
                    await anyio.sleep(pause)
            except Exception as error:
                logger.exception("the writer failed on a flush of %d entries", len(batch))
                for item in batch:
                    item.end(error)
            except BaseException:
                # Cancelled: the writer closes.
                for item in batch:
                    item.end(anyio.ClosedResourceError())
                raise
            finally:
                self._flushing = False

    def _next_batch(self) -> list[_Append]:
        batch: list[_Append] = []
        size = 0
        while self._queue and len(batch) < _FLUSH_ENTRIES:
            size += len(self._queue[0].data)
            if batch and size > _FLUSH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _flush(self, batch: list[_Append]) -> None:
        """Bring a batch into Redis, whatever it takes, and end every append in it."""
        commands: list[tuple[Any, ...]] = []
        places: list[int] = []
        for item in batch:
            places.append(len(commands))
            if item.more is None or len(item.data) > _INLINE_BYTES:
                commands.append(("XADD", item.key, item.id, "v", self._schema, "d", item.data))
            else:
                commands.append(item.more(self._schema, item.data))
            if item.done is not None:
                commands.append(item.done)
        repeated = False
        backoff = Backoff()
        while True:
            try:
                replies = await self._link.ask(*commands)
                outcomes = [replies[place] for place in places]
                if not all(isinstance(outcome, Exception) and is_transient(outcome) for outcome in outcomes):
                    break
                problem: Exception = outcomes[0]
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                # Some of it may be there.
                repeated = True
                problem = error
            pause = backoff.next()
            logger.log(backoff.level, "%d entries wait for Redis: %s", len(batch), problem)
            await anyio.sleep(pause)
        for item, outcome in zip(batch, outcomes, strict=True):
            large = item.more is not None and len(item.data) > _INLINE_BYTES
            if not isinstance(outcome, Exception):
                if large:
                    await self._finish(item)
                item.end()
            elif not _is_fence(outcome):
                item.end(as_bus_error(outcome))
            elif repeated and await self._holds(item):
                if large:
                    await self._finish(item)
                item.end()
            else:
                item.end(Fenced(f"event {item.id} of {item.key} is not after the last one there"))

    async def _holds(self, item: _Append) -> bool:
        """Whether the stream holds exactly this event."""
        found = await self._insist(("XRANGE", item.key, item.id, item.id))
        return isinstance(found, list) and bool(found) and _field(found[0][1], b"d") == item.data

    async def _finish(self, item: _Append) -> None:
        """Do what goes with a large event that the stream holds."""
        assert item.more is not None
        await self._insist(item.more("", b""))

    async def _insist(self, command: tuple[Any, ...]) -> Any:
        """The reply to a command that may be carried out twice, whatever it takes."""
        backoff = Backoff()
        while True:
            try:
                (reply,) = await self._link.ask(command)
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                await anyio.sleep(backoff.next())
                continue
            return reply


def _is_fence(error: Exception) -> bool:
    text = str(error)
    return "equal or smaller than" in text or "exhausted the last possible ID" in text


def _field(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """A field of an entry as Redis replies it: names and values in turn."""
    for index in range(0, len(fields), 2):
        if fields[index] == name:
            return fields[index + 1]
    return None
