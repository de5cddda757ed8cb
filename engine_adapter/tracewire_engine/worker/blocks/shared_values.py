"""Values that all blocks of a trace share, in the worker: one object for each value, whatever the number of requests.

Shared values live from the trace's first request until its last one is over, whether the requests run in one batch or
one after the other. The adapter names all requests beforehand (`SharedValues`), because the scheduler may end one
before another has begun. At the end of a step the worker finds what the blocks have changed, as it does for a block's
own saves. It reports that once, under the name of the run in place of a request's id.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.messages import SharedValues
from tracewire_engine.worker.large_arrays import LargeArrayBudget
from tracewire_engine.worker.save_tracker import SaveTracker
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["SharedRun", "SharedRuns"]

_shares = msgspec.msgpack.Decoder(SharedValues)


class SharedRun:
    """The shared values of one attempt of a trace."""

    def __init__(self, share: SharedValues, values: dict[str, Any], budget: LargeArrayBudget) -> None:
        self.name = share.name
        self.values = values
        self.tracker = SaveTracker(budget)
        #: How many steps of this run have been reported.
        self.steps = 0
        self._left = {(request, choice) for request, choices in share.members.items() for choice in range(choices)}

    def leave(self, request: str, choice: int) -> bool:
        """Note that a request's choice is over. Returns whether all choices of all requests are."""
        self._left.discard((request, choice))
        return not self._left

    def dispose(self) -> None:
        """Free the values."""
        self.values.clear()


class SharedRuns:
    """The shared values of all traces on this worker."""

    def __init__(self, device: torch.device, budget: LargeArrayBudget) -> None:
        self._device = device
        self._budget = budget
        self.runs: dict[str, SharedRun] = {}
        self._members: dict[str, str] = {}

    def join(self, encoded: bytes) -> SharedRun:
        """Enter a request of a trace that has shared values. The first one of a run decodes the values.

        Raises:
            Exception: any exception of decoding a value.
        """
        share = _shares.decode(encoded)
        run = self.runs.get(share.name)
        if run is None:
            values = to_tensors(unpack(share.values), self._device)
            run = self.runs[share.name] = SharedRun(share, values, self._budget)
            self._members.update(dict.fromkeys(share.members, share.name))
        return run

    def leave(self, request: str, choice: int) -> SharedRun | None:
        """Note that a request's choice is over, whether or not it ever ran.

        Returns:
            The run, which is forgotten, if this was its last choice; else `None`.
        """
        run = self.runs.get(self._members.get(request, ""))
        if run is None or not run.leave(request, choice):
            return None
        self.forget(run.name)
        return run

    def run_name(self, request: str) -> str | None:
        """The name of the run that a request belongs to; `request` is the adapter's id."""
        return self._members.get(request)

    def forget(self, name: str) -> None:
        """Drop a run, if it is there. Called for a run whose remaining requests will never come."""
        if self.runs.pop(name, None) is not None:
            self._members = {request: run for request, run in self._members.items() if run != name}
