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
#: A pause that is not worth the timer.
_SHORT_S = 1e-3


# An event and what goes with it, which must not happen where the event is refused: for its id, or because another
# attempt has been begun, whose end this is not. The script begins with what even a Redis that is full does not refuse,
# so that an end can always be written. KEYS: events, blobs, record, changes, operations, deadlines, snapshot, firehose.
# ARGV: id, schema, data, how long to keep the trace from now on or '', '1' if that is its end, the version of the last
# change that it tells of or '', attempt, trace, then what the firehose is told of it, if anything.
_APPEND: Final = Script(
    TELL
    + """
redis.call('HDEL', KEYS[3], '')
if tonumber(redis.call('HGET', KEYS[3], 'a') or 0) > tonumber(ARGV[7]) then
  -- Nor is anything of this attempt to come behind it, which needs no script and would leave a hole.
  redis.pcall('XSETID', KEYS[1], ARGV[7] .. '-18446744073709551615')
  return redis.error_reply('FENCED by a later attempt')
end
local said = redis.pcall('XADD', KEYS[1], ARGV[1], 'v', ARGV[2], 'd', ARGV[3])
if type(said) == 'table' and said.err then return said end
if ARGV[6] ~= '' then redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', ARGV[6]) end
if ARGV[4] ~= '' then
  redis.call('EXPIRE', KEYS[1], ARGV[4])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
if ARGV[5] == '1' then
  redis.call('EXPIRE', KEYS[3], ARGV[4])
  redis.call('EXPIRE', KEYS[7], ARGV[4])
  redis.call('DEL', KEYS[4])
  -- For a controller whose answer was lost, and who asks again.
  redis.call('EXPIRE', KEYS[5], 60)
  redis.call('ZREM', KEYS[6], ARGV[8])
end
if ARGV[9] then tell(KEYS[8], 'c', redis.call('HGET', KEYS[3], 'c') or '', unpack(ARGV, 9)) end
return ARGV[1]
"""
)


class Fenced(BusError):
    """The stream has this event already, or a later one: of a newer attempt, or the final. Nothing was appended."""


class EntryTooLarge(BusError, ValueError):
    """More than one entry can hold."""


class _Append:
    """One event on its way, and what came of it."""

    __slots__ = ("command", "data", "done", "id", "key", "outcome")

    def __init__(
        self,
        key: str,
        id_: str,
        data: bytes,
        command: tuple[Any, ...],
        done: tuple[Any, ...] | None,
        outcome: asyncio.Future[Exception | None],
    ) -> None:
        self.key = key
        self.id = id_
        self.data = data
        #: What appends it, and does what goes with it.
        self.command = command
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
        done: tuple[str, str, str, int] | tuple[str, str, str] | None = None,
        told: int | None = None,
        life: Sequence[Any] | None = None,
    ) -> Coroutine[Any, Any, str]:
        """Queue an encoded event at once. Await what it returns for the event's id, when Redis has it.

        Events are numbered and queued in one order: call it for the next event of a trace before awaiting anything
        else. While Redis is away it waits. A cancelled append may still be carried out, so its number is spent.

        `final` gives it the greatest id of all and lets the trace expire, its blobs with it. `done`, a model, the trace
        of a queue entry, who holds it and from which take (its number), settles that entry in the same round trip, if
        it is held so; also where the event is refused. `told` says that the event tells of all
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
        command: tuple[Any, ...] = ("XADD", key, id_, "v", self._schema, "d", data)
        if final or seq == 0 or told is not None or life is not None:
            tag = keys.tag(trace)
            names = (
                *(key, keys.blobs(trace), keys.record(trace), keys.changes(trace), keys.operations(trace)),
                *(keys.deadlines(tag), keys.snapshot(trace), keys.firehose(tag)),
            )
            keep = self._retention_s if final else UNFINISHED_S if seq == 0 else ""
            end, version = "1" if final else "", "" if told is None else told
            script = _APPEND(names, id_, self._schema, data, keep, end, version, attempt, trace, *(life or ()))
            # With its text: what comes behind it in a pipeline must not overtake it.
            command = with_text(script) or command
        settle = None if done is None else settling(keys, *done)
        item = _Append(key, id_, data, command, settle, self._loop.create_future())
        self._queue.append(item)
        self._wanted.notify()
        return self._outcome(item, done)

    async def _outcome(self, item: _Append, done: tuple[Any, ...] | None) -> str:
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
        repeated = False
        backoff = Backoff()
        while batch:
            commands: list[tuple[Any, ...]] = []
            places: list[int] = []
            for item in batch:
                places.append(len(commands))
                commands.append(item.command)
                if item.done is not None:
                    commands.append(item.done)
            waiting = batch
            try:
                replies = await self._link.ask(*commands)
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                # Some of it may be there.
                repeated = True
                problem = error
            else:
                # A server that is demoted in the middle, or one of several that is away, leaves some of it over.
                waiting = []
                for item, place in zip(batch, places, strict=True):
                    outcome, *behind = replies[place : place + (1 if item.done is None else 2)]
                    # What could not be done behind an entry is done with it once more.
                    counted = behind if not isinstance(outcome, Exception) else []
                    missing = [one for one in (outcome, *counted) if isinstance(one, Exception) and is_transient(one)]
                    if missing:
                        waiting.append(item)
                        problem = missing[0]
                        repeated = repeated or bool(counted)
                    else:
                        await self._end(item, outcome, repeated)
            batch = waiting
            if batch:
                pause = backoff.next()
                logger.log(backoff.level, "%d entries wait for Redis: %s", len(batch), problem)
                await anyio.sleep(pause)

    async def _end(self, item: _Append, outcome: Any, repeated: bool) -> None:
        if not isinstance(outcome, Exception):
            item.end()
        elif not _is_fence(outcome):
            item.end(as_bus_error(outcome))
        elif repeated and await self._holds(item):
            item.end()
        else:
            item.end(Fenced(f"event {item.id} of {item.key} is not after the last one there"))

    async def _holds(self, item: _Append) -> bool:
        """Whether the stream holds exactly this event."""
        backoff = Backoff()
        while True:
            try:
                (found,) = await self._link.ask(("XRANGE", item.key, item.id, item.id))
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                await anyio.sleep(backoff.next())
                continue
            return isinstance(found, list) and bool(found) and _field(found[0][1], b"d") == item.data


def _is_fence(error: Exception) -> bool:
    text = str(error)
    return text.startswith("FENCED") or "equal or smaller than" in text or "exhausted the last possible ID" in text


def _field(fields: Sequence[bytes], name: bytes) -> bytes | None:
    """A field of an entry as Redis replies it: names and values in turn."""
    for index in range(0, len(fields), 2):
        if fields[index] == name:
            return fields[index + 1]
    return None
