"""Pauses a trace's requests in the engine: for a client that asks for it, and while events wait for Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import anyio

from tracewire_bus.wire.messages import Lagging

from .bulk_writer import TraceBulk
from .engine_api import Engine
from .running_request import RunningRequest
from .trace_stream import UNNUMBERED

__all__ = ["RequestPause", "TraceLag"]


class RequestPause:
    """Pauses the requests of a run in the engine, and resumes them when no reason for the pause is left."""

    def __init__(self, engine: Engine, requests: Sequence[RunningRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._reasons: set[str] = set()
        self._paused = False
        self._lock = anyio.Lock()

    async def change(self, reason: str, on: bool) -> None:
        """Add or remove a reason. Returns once the engine has paused or resumed the requests, if it has to.

        Raises:
            EngineLost: the engine died.
        """
        (self._reasons.add if on else self._reasons.discard)(reason)
        async with self._lock:
            paused = bool(self._reasons)
            if paused == self._paused:
                return
            for request in self._requests:
                await (self._engine.pause if paused else self._engine.resume)(request.name)
            self._paused = paused

    async def join(self, request: str) -> None:
        """Pause a request that has started behind the others, if they are paused.

        Raises:
            EngineLost: the engine died.
        """
        async with self._lock:
            if self._paused:
                await self._engine.pause(request)


class TraceLag:
    """Slows one run while its events wait for Redis, in the way that its submission chose (`on_lag`).

    Attributes:
        held: whether the run's requests are paused because of the lag.
        thinned: whether the run leaves out reads of declared interventions.
        spilled: whether the run puts all saves into the bulk store.
    """

    def __init__(
        self,
        requests: Sequence[RunningRequest],
        pause: RequestPause,
        on_lag: Literal["hold", "thin", "spill"],
        reads: bool,
        bulk: TraceBulk | None = None,
    ) -> None:
        self._requests = requests
        self._pause = pause
        self._bulk = bulk
        self._spills = on_lag == "spill" and bulk is not None
        #: Whether the run was held because it could not be spilled.
        self._lacks_store = on_lag == "spill" and bulk is None
        self._was_held = False
        #: Whether the run has reads, and may leave them out.
        self._thins = on_lag == "thin" and reads
        self.held = self.thinned = self.spilled = False

    @property
    def output_bytes(self) -> int:
        """The approximate memory of the outputs of vLLM that are not published yet, in bytes."""
        return sum([request.outputs.size() for request in self._requests])

    @property
    def nbytes(self) -> int:
        """About how many bytes of this run wait to be published: vLLM's outputs and the workers' reports."""
        reports = [request.pending.nbytes for request in self._requests if request.pending is not None]
        return self.output_bytes + sum(reports)

    @property
    def slowed(self) -> bool:
        """Whether the run is slowed in any way."""
        return self.held or self.thinned or self.spilled

    @property
    def left_out(self) -> int:
        """The number of steps of a choice whose reads were left out so far."""
        return sum(
            choice.reads.left_out
            for request in self._requests
            if request.pending is not None
            for choice in request.pending.choices
        )

    def warnings(self) -> list[str]:
        """Warnings about the trace's saves for its consumers, at its end."""
        found = []
        if self.left_out:
            found.append(f"the engine left out the reads of interventions in {self.left_out} steps: Redis was late")
        if self._lacks_store and self._was_held:
            found.append("the engine held the trace while Redis was late: on_lag='spill' needs an engine with --bulk")
        if self._bulk is not None and self._bulk.refused:
            refused = self._bulk.refused
            found.append(f"the saves of {refused} outputs went to Redis: the engine's bulk store took no more")
        return found

    async def check(self, share: int) -> Lagging | None:
        """Slow the run if more than `share` bytes of it wait, and speed it up again once at most half of that waits.

        A thinned or spilled run is held at twice its share. Returns the event that says what changed, if anything did.

        Raises:
            EngineLost: the engine died.
        """
        nbytes = self.nbytes
        if nbytes > share and self._thins and not self.thinned:
            self._thin(True)
            return self._event("thinned", nbytes)
        if nbytes > share and self._spills and not self.spilled:
            self._spill(True)
            return self._event("spilled", nbytes)
        if nbytes > (2 * share if self.thinned or self.spilled else share) and not self.held:
            self.held = self._was_held = True
            await self._pause.change("lag", True)
            return self._event("held", nbytes)
        if nbytes <= share // 2 and self.slowed:
            self._thin(False)
            self._spill(False)
            if self.held:
                self.held = False
                await self._pause.change("lag", False)
            return self._event("caught_up", nbytes)
        return None

    def _thin(self, on: bool) -> None:
        self.thinned = on
        for request in self._requests:
            if request.pending is not None:
                for choice in request.pending.choices:
                    choice.reads.thinned = on

    def _spill(self, on: bool) -> None:
        if self._bulk is not None:
            self.spilled = self._bulk.everything = on and self._spills

    def _event(self, action: Literal["held", "thinned", "spilled", "caught_up"], nbytes: int) -> Lagging:
        return Lagging(**UNNUMBERED, action=action, nbytes=nbytes, left_out=self.left_out, time=time.time())
