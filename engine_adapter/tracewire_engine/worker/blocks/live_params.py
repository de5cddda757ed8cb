"""Live parameters in the worker: they change between two steps, and on all ranks between the same two.

The adapter broadcasts the changes of all its traces in one call, which every rank receives between the same two steps.
A change takes effect when the next step begins. The worker then plans declared interventions anew with the new values,
and a block that reads `live.alpha` gets the value of the step for which it reads. A block runs ahead of the model:
the next turn of its loop begins while the model is still in the step before. A read that is meant for a later step
therefore waits until that step begins, as a read of a module's output does.

The values belong to a *run*, one attempt of a trace, and are shared by all its requests. A request with *scheduled*
changes has values of its own: those of the run, and its changes from their tokens on.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.interleaver import Mediator

from tracewire_bus.wire.packing import decoder, unpack
from tracewire_engine.protocol.schedule import Scheduled, decode_schedule
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["LIVE", "LiveRun", "LiveRuns", "LiveValues", "ScheduledRun"]

#: The location at which blocks wait for the beginning of a step.
LIVE = "tracewire.live"

_changes = decoder(tuple[float, dict[str, tuple[int, dict[str, Any]]], list[str]])


class LiveRun:
    """The live parameters of one run: their version, their values as they arrived, and the requests that read them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.values: dict[str, Any] = {}
        #: By the scheduler's request id: the adapter's request id, and the index of the choice.
        self.requests: dict[str, tuple[str, int]] = {}
        #: Whether a change ever came. If so, this object is kept until the adapter says that the run is over.
        self.changed = False
        #: By the scheduler's request id: the values of each request that has scheduled changes of its own.
        self.scheduled: dict[str, ScheduledRun] = {}


class ScheduledRun(LiveRun):
    """The live parameters of one request with scheduled changes: those of its run, and the changes of its tokens."""

    def __init__(self, name: str, values: dict[str, Any], changes: list[Scheduled]) -> None:
        super().__init__(name)
        self.values = dict(values)
        self._changes = deque(changes)

    def advance(self, index: int) -> bool:
        """Put the changes into effect that hold for the step that samples the token `index`. Returns whether any does.

        In a step that samples none, `index` is negative.
        """
        before = len(self._changes)
        while self._changes and self._changes[0].index <= max(0, index):
            self.values = {**self.values, **self._changes.popleft().values}
        return len(self._changes) < before


class LiveRuns:
    """The live parameters of all runs in this worker."""

    def __init__(self) -> None:
        self.runs: dict[str, LiveRun] = {}
        self._pending: dict[str, tuple[int, dict[str, Any]]] = {}
        #: When the adapter sent the oldest pending change, and when the last steps began (`time.time()`).
        self._sent = 0.0
        self._begun: deque[float] = deque(maxlen=32)

    def steer(self, encoded: bytes) -> list[str]:
        """Take changes that take effect with the next step, and forget runs that are over.

        Args:
            encoded: as `encode_changes` of `link/step_link.py` returns it.

        Returns:
            The names of the runs that are over.
        """
        over: list[str]
        sent, changes, over = _changes(encoded)
        if changes and not self._pending:
            self._sent = sent
        for name, (version, values) in changes.items():
            before = self._pending.get(name)
            self._pending[name] = version, {**before[1], **values} if before else values
        for name in over:
            self._pending.pop(name, None)
            self.runs.pop(name, None)
        return over

    @property
    def late(self) -> int:
        """How many steps have begun since the adapter sent the changes that were applied last.

        The step that applied them counts too.
        """
        return sum(began >= self._sent for began in self._begun)

    def apply(self) -> list[LiveRun]:
        """Begin a step: put the changes that were taken into effect. Returns the runs that changed."""
        self._begun.append(time.time())
        if not self._pending:
            return []
        changed = []
        for name, (version, values) in self._pending.items():
            run = self.runs.setdefault(name, LiveRun(name))
            run.version, run.changed = version, True
            run.values = {**run.values, **values}
            for one in run.scheduled.values():
                one.values = {**one.values, **values}
            changed.append(run)
        self._pending = {}
        return changed

    def join(self, name: str, packed: bytes, request_id: str, request: str, choice: int) -> LiveRun:
        """Enter a request of a run.

        Args:
            name: the run's name.
            packed: the live parameters that the submission declared, packed.
            request_id: the scheduler's request id.
            request: the adapter's request id.
            choice: the index of the choice.
        """
        run = self.runs.get(name)
        if run is None:
            run = self.runs[name] = LiveRun(name)
        if not run.requests:
            # Values of a change that came before the run's first request take precedence.
            run.values = {**unpack(packed), **run.values}
        run.requests[request_id] = request, choice
        return run

    def schedule(self, name: str, request_id: str, encoded: bytes) -> ScheduledRun:
        """Give a request that has joined a run values of its own, which change at the tokens of its schedule."""
        run = self.runs[name]
        request, choice = run.requests[request_id]
        own = ScheduledRun(name, run.values, decode_schedule(encoded, choice))
        own.requests[request_id] = request, choice
        run.scheduled[request_id] = own
        return own

    def leave(self, name: str, request_id: str) -> None:
        """Remove a request that is over. The run goes with its last request, unless a change was applied to it."""
        run = self.runs.get(name)
        if run is not None:
            run.requests.pop(request_id, None)
            run.scheduled.pop(request_id, None)
            if not run.requests and not run.changed:
                del self.runs[name]


class LiveValues:
    """The live parameters that a block reads by name: `live.alpha`."""

    def __init__(self, run: LiveRun, device: torch.device) -> None:
        self.__dict__.update(_run=run, _device=device, _converted={})

    def __getattr__(self, name: str) -> Any:
        run: LiveRun = self.__dict__["_run"]
        if name not in run.values:
            declared = ", ".join(sorted(run.values)) or "none"
            raise AttributeError(f"no live parameter {name!r} was declared at submission (declared: {declared})")
        mediator = _wait_for_step()
        # Under pipeline parallelism a block can be behind the model (`staged_mediator.py`).
        values = getattr(mediator, "live_values", None) or run.values
        value, converted = values.get(name, run.values[name]), self.__dict__["_converted"]
        found = converted.get(name)
        if found is None or found[0] is not value:
            # Converted for this block alone, which may change the tensor in place.
            found = converted[name] = value, to_tensors(value, self._device)
        return found[1]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"live parameters are changed by a controller, not by the block: live.{name} cannot be set"
        )

    def __repr__(self) -> str:
        return f"live({', '.join(f'{name}={value!r}' for name, value in self._run.values.items())})"


def _wait_for_step() -> Mediator | None:
    """Wait until the model begins the step that the running block is at. Returns the block's mediator."""
    own = getattr(getcurrent(), "mediator", None)
    mediator: Mediator | None = own() if own is not None else None
    if mediator is None or mediator.iteration is None:
        # No block runs here, or the block was already served a value of this step, so the step has begun.
        return mediator
    if mediator.iteration >= mediator.occurrence(LIVE):
        Mediator.value(LIVE)
    return mediator
