"""How one engine takes entries of a queue, and finds those that a broken connection kept from it."""

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


#: An engine without work looks at least this often, in seconds, should a token of the bell be lost.
_POLL_S: Final = 1.0

#: How long an engine leaves what waits to others who have less, in seconds, before it takes it all the same.
_YIELD_S: Final = 0.03

#: How long a token of an engine's takes is valid, in seconds. A new one costs a round trip.
_TOKEN_S: Final = 24 * 3600

#: How long the other suspects wait for the one that an engine has, in seconds.
SUSPECT_S: float = 60.0

_TAKE: Final = Script("queue_take")

_RECOVER: Final = Script("queue_recover")

#: Stands for nothing taken, because others are to take it.
_LATER: Final[list[Taken]] = []


class Intake:
    """One engine's claims on one queue."""

    def __init__(self, link: Link, names: Sequence[str], engine: str, guard: Guard) -> None:
        self.link = link
        self._guard = guard
        self._names = names
        self._data, self._bell = (names[PARTS.index(part)] for part in ("data", "bell"))
        self._engine = engine
        #: Traces handed out and not settled yet.
        self.claimed: set[str] = set()
        #: Redis may hold entries of ours that were never handed out.
        self._lost = True
        #: Something that was handed out is to be so again.
        self._again = False
        self._token = ""
        self._backoff = Backoff()

    def redeliver(self, trace: str) -> None:
        """What was handed out is to be handed out again."""
        self.claimed.discard(trace)
        self._again = True

    async def take(self, count: int, block_ms: int, room: int) -> list[Taken]:
        deadline = anyio.current_time() + block_ms / 1000
        wait_s, patient = 0.0, 1
        while True:
            try:
                if self._lost or self._again:
                    self._lost, self._again = True, False
                    self._token = uuid.uuid4().hex
                    found = await self._ask(self._recovery(count))
                    # Lost still if there is any: there may be more.
                    if found:
                        return found
                # Settled only once its reply is here: a call that is cancelled leaves claims behind.
                self._lost = True
                more = round(SUSPECT_S * 1e6), len(self.claimed), patient, room
                found = await self._ask(self._call(_TAKE, count, *more), wait_s)
                if found is None:
                    continue
                self._lost = False
                if found is _LATER:
                    await anyio.sleep(_YIELD_S)
                    wait_s, patient = 0.0, 0
                    continue
                patient = 1
                self._backoff.reset()
                # What is left of the last millisecond is no time to wait, and 0 would be for ever.
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
        """Ask, after waiting for the bell; None where our token is not valid any more. What came is ours."""
        # In one go, so that whoever hears the bell takes what it rang for.
        wait = [("BLPOP", self._bell, wait_s)] if wait_s else []
        *_, reply = await self._replies(*wait, call, timeout_s=wait_s + 30)
        if reply is None:
            return None
        if reply == 1:
            return _LATER
        large = [one for one in reply if one[3] is None]
        if large:
            (bodies,) = await self._replies(("HMGET", self._data, *(one[0] for one in large)), timeout_s=30)
            for one, body in zip(large, bodies, strict=True):
                one[3] = body
        taken = [taken_entry(self._guard, self._names[0], one) for one in reply]
        self.claimed.update(one.trace for one in taken)
        return taken

    async def _replies(self, *commands: Sequence[Any], timeout_s: float) -> list[Any]:
        replies = await self.link.ask(*commands, timeout_s=timeout_s)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies
