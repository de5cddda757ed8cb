"""The intake of one engine: takes entries of a queue, and recovers entries whose reply a broken connection lost."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any, Final

import anyio

from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import as_bus_error, is_transient
from tracewire_bus.transport.guard import Guard
from tracewire_bus.transport.link import Link
from tracewire_bus.transport.scripts import Script

from .queue_entries import INLINE_BYTES, PARTS, TAKE_BYTES, Taken, taken_entry, to_bytes

__all__ = ["Intake"]

logger = logging.getLogger("tracewire")


#: An engine without work asks at least this often, in seconds, in case a token of the bell was lost.
_POLL_S: Final = 1.0

#: How long an engine leaves waiting entries to engines with fewer entries, in seconds, before it takes them itself.
_YIELD_S: Final = 0.03

#: How long the token under which an engine takes entries is valid, in seconds. A new one costs a round trip.
_TOKEN_S: Final = 24 * 3600

#: How long an engine that has a suspect gets no other suspect, in seconds.
SUSPECT_S: float = 60.0

_TAKE: Final = Script("queue_take")

_RECOVER: Final = Script("queue_recover")

#: The script replied that engines with fewer entries should take first.
_YIELD: Final[list[Taken]] = []


class Intake:
    """One engine's intake from one queue, over a link of its own. Not for concurrent use."""

    def __init__(self, link: Link, names: Sequence[str], engine: str, guard: Guard) -> None:
        self.link = link
        self._guard = guard
        self._names = names
        self._bell = names[PARTS.index("bell")]
        self._data = names[0].removesuffix("entries") + "data"
        self._engine = engine
        #: Traces whose entries this process has and has not settled.
        self.claimed: set[str] = set()
        #: Whether Redis may have entries under this engine's name that `take` has not returned.
        self._recovery_due = True
        #: Whether `redeliver` was called since the last recovery.
        self._redelivery_due = False
        self._token = ""
        self._backoff = Backoff()

    def redeliver(self, trace: str) -> None:
        """Have a later `take` return this trace's entry again."""
        self.claimed.discard(trace)
        self._redelivery_due = True

    async def take(self, count: int, block_ms: int, room: int) -> list[Taken]:
        """See `Queue.take`.

        Raises:
            BusError: Redis refuses.
        """
        deadline = anyio.current_time() + block_ms / 1000
        wait_s, may_yield = 0.0, 1
        while True:
            try:
                if self._recovery_due or self._redelivery_due:
                    self._recovery_due, self._redelivery_due = True, False
                    self._token = uuid.uuid4().hex
                    found = await self._ask(self._recovery(count))
                    # Redis may have more of them, so the next call recovers again.
                    if found:
                        return found
                # Until the reply is here: a cancelled call may leave entries taken in Redis.
                self._recovery_due = True
                more = round(SUSPECT_S * 1e6), len(self.claimed), may_yield, room
                found = await self._ask(self._call(_TAKE, count, *more), wait_s)
                if found is None:
                    continue
                self._recovery_due = False
                if found is _YIELD:
                    await anyio.sleep(_YIELD_S)
                    wait_s, may_yield = 0.0, 0
                    continue
                may_yield = 1
                self._backoff.reset()
                # BLPOP with a timeout of 0 would wait for ever.
                wait_s = min(deadline - anyio.current_time(), _POLL_S)
                if found or wait_s < 0.001:
                    return found
            except Exception as error:
                if not is_transient(error):
                    raise as_bus_error(error) from error
                pause = self._backoff.next()
                logger.log(self._backoff.level, "the intake of %s waits for Redis: %s", self._bell, error)
                await anyio.sleep(min(pause, max(0.05, deadline - anyio.current_time())))
                if anyio.current_time() >= deadline:
                    return []
                wait_s = 0.0

    def _call(self, script: Script, count: int, *more: Any) -> tuple[Any, ...]:
        return script(self._names, self._token, self._engine, count, TAKE_BYTES, INLINE_BYTES, *more)

    def _recovery(self, count: int) -> tuple[Any, ...]:
        return self._call(_RECOVER, count, _TOKEN_S, *map(to_bytes, self.claimed))

    async def _ask(self, call: Sequence[Any], wait_s: float = 0.0) -> list[Taken] | None:
        """Wait up to `wait_s` seconds for the bell, execute a script, and claim the entries that it replies.

        Returns `_YIELD` if engines with fewer entries should take first, and None if this engine's token has expired.
        """
        # In one pipeline, so that the engine that the bell wakes also takes the entry that rang the bell.
        wait = [("BLPOP", self._bell, wait_s)] if wait_s else []
        *_, reply = await self._replies(*wait, call, timeout_s=wait_s + 30)
        if reply is None:
            return None
        if reply == 1:
            return _YIELD
        large = [one for one in reply if one[3] is None]
        if large:
            (bodies,) = await self._replies(("HMGET", self._data, *(one[0] for one in large)), timeout_s=30)
            for one, body in zip(large, bodies, strict=True):
                one[3] = body
        taken = [taken_entry(self._guard, self._names[0], one) for one in reply]
        self.claimed.update(one.trace for one in taken)
        return taken

    async def _replies(self, *commands: Sequence[Any], timeout_s: float) -> list[Any]:
        replies = await self.link.execute(*commands, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies
