"""The events about scheduled changes: consumers read them as they read changes of clients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from tracewire_bus.wire.messages import FirstToken, RawSteered, ScheduledChange

from .live_changes import LiveTrace

__all__ = ["ScheduledNotes"]


class _Change(msgspec.Struct, array_like=True):
    """A `Change` whose values are packed."""

    version: int
    by: str
    time: int
    values: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode


class ScheduledNotes:
    """The scheduled changes of one run, which the stream tells before the first token of each."""

    def __init__(self, changes: Sequence[ScheduledChange]) -> None:
        self._changes = sorted(changes, key=lambda change: change.index)
        self._waiting: dict[tuple[int, int], deque[ScheduledChange]] = {}

    def due(self, invoke: int, choice: int, tokens: int, live: LiveTrace | None) -> list[RawSteered]:
        """The events to publish before a choice has `tokens` tokens. `live` has the version of the live parameters."""
        if not self._changes:
            return []
        version = 0 if live is None else live.told_version
        waiting = self._waiting.get((invoke, choice))
        if waiting is None:
            own = (one for one in self._changes if one.invoke in (None, invoke) and one.choice in (None, choice))
            waiting = self._waiting[invoke, choice] = deque(own)
        found = []
        while waiting and waiting[0].index < tokens:
            change, now = waiting.popleft(), time.time()
            encoded = _encode(_Change(version, change.by or "schedule", round(now * 1000), msgspec.Raw(change.values)))
            first = [FirstToken(invoke=invoke, choice=choice, index=change.index)]
            found.append(
                RawSteered(attempt=0, seq=0, version=version, first=first, time=now, changes=[msgspec.Raw(encoded)])
            )
        return found
