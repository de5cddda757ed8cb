"""A bus as `tracewire top` shows it: its engines and traces, their speed, and their last saves."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import anyio
import anyio.abc

from tracewire.admin.engines import Engine
from tracewire.client import Client
from tracewire.errors import TracewireError
from tracewire.traces.output import Output
from tracewire_bus.store.trace_list import ListedTrace

from .traces import RUNNING
from .view import TraceView

__all__ = ["Fleet", "Followed", "Rate"]

#: How many traces are followed at once.
_FOLLOWED = 40
#: The time over which tokens a second are counted, in seconds.
_WINDOW_S = 5.0


class Rate:
    """Tokens a second over the last seconds."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        """Count tokens."""
        self._counts.append((now, count))

    def value(self, now: float) -> float:
        """Tokens a second."""
        while self._counts and self._counts[0][0] < now - _WINDOW_S:
            self._counts.popleft()
        took = min(_WINDOW_S, now - self._began)
        return sum(count for _, count in self._counts) / took if took > 0 else 0.0


class Followed:
    """A trace that is followed: its entry in the list, and the view of its events."""

    def __init__(self, listed: ListedTrace, now: float) -> None:
        self.listed = listed
        self.view = TraceView(listed.trace_id)
        self.rate = Rate(now)
        self.scope = anyio.CancelScope()

    @property
    def state(self) -> str:
        """The trace's state: the events know it first."""
        return self.view.status if self.view.status != "queued" else self.listed.state

    def snapshot(self, now: float) -> dict[str, Any]:
        """The present state, as JSON."""
        return {
            "trace_id": self.listed.trace_id,
            "model": self.listed.model,
            "client": self.listed.client,
            "engine": self.view.engine or self.listed.engine,
            "state": self.state,
            "tokens": self.view.tokens,
            "tokens_per_second": round(self.rate.value(now), 1),
            "saves": {name: reading.text for name, reading in self.view.readings.by_name.items()},
        }


class Fleet:
    """The engines and the running traces of a bus, looked up again and again, and followed meanwhile."""

    def __init__(self, client: Client, group: anyio.abc.TaskGroup, model: str | None = None) -> None:
        self._client = client
        self._group = group
        #: Whose engines and traces are shown; `None` for all.
        self.model = model
        self.engines: list[Engine] = []
        #: The names of all models that are served.
        self.served: list[str] = []
        self.traces: dict[str, Followed] = {}
        #: Why the last look failed; `""` if it did not.
        self.error = ""

    async def look(self) -> None:
        """Ask for the engines and traces, and follow the traces that are new."""
        try:
            running = await self._client.engines.list()
            listed = await self._client.traces.list(model=self.model, states=RUNNING, limit=_FOLLOWED)
            self.error, self.served = "", sorted({one.model for one in running})
            self.engines = [one for one in running if self.model in (None, one.model)]
        except TracewireError as error:
            self.error = str(error)
            return
        known = {one.trace_id: one for one in listed}
        for trace_id in [one for one in self.traces if one not in known]:
            self.traces.pop(trace_id).scope.cancel()
        # The oldest first, so that a line stays where it is.
        self.traces = {
            one.trace_id: self.traces.get(one.trace_id) or self.follow(one, "now") for one in reversed(listed)
        }
        for trace_id, followed in self.traces.items():
            followed.listed = known[trace_id]

    def follow(self, listed: ListedTrace, since: str) -> Followed:
        """Follow a trace until its end, or until its scope is cancelled."""
        followed = Followed(listed, time.monotonic())
        self._group.start_soon(self._feed, followed, since)
        return followed

    async def _feed(self, followed: Followed, since: str) -> None:
        with followed.scope:
            try:
                async for event in self._client.subscribe(followed.listed.trace_id, since=since):
                    followed.view.feed(event)
                    if isinstance(event, Output):
                        followed.rate.add(len(event.token_ids), time.monotonic())
            except TracewireError as error:
                followed.view.note = str(error)

    def tokens_per_second(self, engine: str) -> float:
        """Of all traces of an engine together."""
        now = time.monotonic()
        return sum(
            one.rate.value(now) for one in self.traces.values() if (one.view.engine or one.listed.engine) == engine
        )

    def snapshot(self) -> dict[str, Any]:
        """The present state, as JSON."""
        now = time.monotonic()
        return {
            "time": time.time(),
            "engines": [
                {
                    "name": one.name,
                    "model": one.model,
                    "state": one.state,
                    "running": one.running,
                    "capacity": one.capacity,
                    "tokens_per_second": round(self.tokens_per_second(one.name), 1),
                }
                for one in self.engines
            ],
            "traces": [one.snapshot(now) for one in self.traces.values()],
        }
