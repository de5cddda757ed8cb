"""Blocks under pipeline parallelism: every stage runs the block, and sends the others the values that it served.

A stage's forward pass runs its own modules only. A block reads locations of all stages, so its copy on a stage also
parks at locations that this stage never runs. Each stage therefore keeps a log of the values that it served to the
block (the event, the location and the value) and sends the log to the other stages. These feed their copies of the
block from it, as if the model had run there:

    stage 0    forward of step t ──┬──────────────────────────▶  before its next step with that request: fed by stage 1
                                   │ log: what stage 0 served                 ▲
    stage 1                        └▶ fed by stage 0, forward of step t, samples ┘ log: what stage 1 served

Logs go over the CPU group of vLLM's pipeline group, beside the activations. They hold only values that blocks asked
for, and a step without such values sends nothing. Each stage knows whether a step sends logs from what the scheduler
has told all stages and from the logs themselves. So no stage waits for a log that is never sent.

All copies of a block must do the same. If a copy departs from the log (because of a random number that the block did
not seed, or a clock) or fails alone, the request fails on all stages. The last stage samples and has received all logs,
so it alone reports.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any, NamedTuple

import torch
from nnsight.intervention.cache import Cache
from nnsight.intervention.interleaver import Event
from nnsight.util import apply

from tracewire_engine.worker.blocks.live_params import LIVE
from tracewire_engine.worker.blocks.mediator import RESULT, BlockMediator
from tracewire_engine.worker.blocks.plain_values import CopyingCache

from .topology import OtherStage, Topology

__all__ = ["Entry", "StagedMediator", "StagesDiffer"]

#: Locations that every stage serves to its own copy.
_OURS = (LIVE, RESULT, None)

#: The kind of a log's entry that `tracer.cache()` recorded; all others are nnsight's events.
_CACHED = "CACHED"


class StagesDiffer(RuntimeError):
    """A block behaved differently on two pipeline stages."""


class Entry(NamedTuple):
    """One request of a block that a stage served: the event's name, the location, its occurrence and the value read.

    `order` counts all that the stage has served, over all blocks. Other stages feed their copies in this order.
    """

    event: str
    location: str
    occurrence: int
    value: Any
    order: int = 0


def _kept(value: Any) -> Any:
    """A copy of a served value, since the block, and the model after it, may change the value in place."""
    return apply(value, torch.clone, torch.Tensor)


class _LoggedCache(CopyingCache):
    """A `tracer.cache()` that enters its records in the log, for the caches on other stages."""

    def _record(self, path: str, key: str, value: Any) -> None:
        super()._record(path, key, value)
        mediator: StagedMediator = self.__dict__["mediator"]
        mediator.note(_CACHED, path, mediator.caches.index(self), (key, value))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "mediator"}


class _Random:
    """Gives one block the same torch random numbers on all stages.

    The stages' own generators differ, since other requests draw from them differently.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: torch.Tensor | None = None
        self._device: torch.Tensor | None = None
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __enter__(self) -> None:
        accelerated = torch.cuda.is_available()
        self._before = torch.get_rng_state(), torch.cuda.get_rng_state() if accelerated else None
        if self._state is None:
            torch.manual_seed(self._seed)
            return
        torch.set_rng_state(self._state)
        if self._device is not None:
            torch.cuda.set_rng_state(self._device)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._before[0])
        if self._before[1] is not None:
            self._device = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(self._before[1])


class StagedMediator(BlockMediator):
    """A block's copy on one stage."""

    pending: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[Entry] = []
        #: Log entries of other stages that this copy has not been fed yet.
        self.incoming: deque[Entry] = deque()
        #: The live parameters of the step that the block is at. The block may be behind the model.
        self.live_values: dict[str, Any] | None = None
        self._fed = False
        self._random = _Random(0)
        #: The module of a later stage that the block waits for, and how often the model had passed each location when
        #: the wait began.
        self._waited: tuple[str, dict[str, int]] | None = None

    @property
    def over(self) -> bool:
        """Whether the block and its caches will ask for nothing more."""
        if self.exception is not None:
            return True
        return self.worker is not None and self.worker.dead and not self.caches

    def name(self, request: str) -> None:
        """Seed the block's random numbers by its request, which is the same on all stages. Called before it starts."""
        self._random = _Random(zlib.crc32(request.encode()))

    def begin_step(self) -> None:
        """Note that the model begins a step with this request."""
        self._waited = None
        self.live_values = self.live.values

    def switch(self, *args: Any) -> Any:
        pending = self.pending
        if pending is not None and not self._fed and pending.provider not in _OURS:
            value = _kept(args[0]) if args and pending.event is Event.VALUE else None
            self.note(pending.event.name, pending.provider, pending.iteration, value)
        self._fed = False
        try:
            with self._random:
                return super().switch(*args)
        finally:
            for cache in self.caches:
                if type(cache) is CopyingCache:
                    cache.__class__ = _LoggedCache
                    cache.__dict__["mediator"] = self

    def note(self, event: str, location: str, occurrence: int, value: Any) -> None:
        """Enter a value that this stage has served in the log."""
        topology: Topology = self.interleaver.topology
        topology.served += 1
        self.log.append(Entry(event, location, occurrence, value, topology.served))

    def dispose(self) -> None:
        for cache in self.caches:
            cache.__dict__.pop("mediator", None)
            cache.__class__ = CopyingCache
        super().dispose()
        self.log.clear()
        self.incoming.clear()

    # --- called by the block ----------------------------------------------------------------------------------------

    def wanted(self, location: str) -> int:
        asked = super().wanted(location)
        topology: Topology = self.interleaver.topology
        owner = topology.owner(location)
        if owner == topology.index and self._waited is not None:
            self._check_passed(location)
        if owner is None or owner == topology.index or self.iteration is not None:
            return asked
        # This stage cannot count how often another stage passes a module, so it assumes once a step.
        steps: int = self.occurrence(LIVE)
        return max(0, steps if owner < topology.index or topology.catching_up else steps - 1)

    def _check_passed(self, location: str) -> None:
        """Refuse a location that the model has passed on this stage while the block waited for a later stage.

        Raises:
            OtherStage: the model has passed it.
        """
        assert self._waited is not None
        module, passed = self._waited
        before, now = passed.get(location, 0), self.occurrence(location)
        asked = before if self.iteration is None else self.iteration
        if before <= asked < now:
            topology: Topology = self.interleaver.topology
            raise OtherStage(
                f"{_short(location)} is on pipeline stage {topology.index}, and the model had passed it before "
                f"{_short(module)}, which stage {topology.owner(f'{module}()')} holds, could be called in this step: "
                "read the locations of earlier stages before you call modules of later ones"
            )

    def called(self, path: str, result: Any) -> None:
        """Log the block's call of a module that this stage holds and other stages do not."""
        self.note(Event.VALUE.name, f"{path}()", 0, _kept(result))

    def calls_elsewhere(self, path: str) -> None:
        """Prepare the block's call of a module that another stage holds, whose result that stage's log will bring.

        Raises:
            OtherStage: the module is on an earlier stage, which has finished its part of this step.
        """
        topology: Topology = self.interleaver.topology
        owner = topology.owner(f"{path}()")
        assert owner is not None
        if owner < topology.index:
            if not self.incoming or self.incoming[0].location != f"{path}()":
                raise OtherStage(
                    f"{_short(path)} is on pipeline stage {owner}, which has finished its part of this step: a block "
                    f"can call it only before it asks for anything of stage {topology.index}"
                )
        elif self._waited is None:
            counts, start = self.interleaver.counts, self.counts_at_start
            self._waited = path, {where: count - start.get(where, 0) for where, count in counts.items()}

    # --- fed by other stages ----------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Serve the first of the `incoming` entries to the block.

        Raises nothing: an error of the block is in `exception` afterwards.
        """
        if not self.incoming:
            return
        entry = self.incoming[0]
        if entry.event == _CACHED:
            if entry.occurrence < len(self.caches):
                Cache._record(self.caches[entry.occurrence], entry.location, *entry.value)
            self.incoming.popleft()
            return
        pending = self.pending
        if pending is None:
            if self.exception is None:
                self._differ(f"it has ended here, but asked for {_short(entry.location)} on another stage")
            self.incoming.clear()
            return
        if pending.provider != entry.location or pending.event.name != entry.event or self._other_step(entry):
            self._differ(f"it asks for {_short(pending)} here, but for {_short(entry.location)} on another stage")
            self.incoming.clear()
            return
        self.incoming.popleft()
        if self.iteration:
            self.iteration = None
        self._fed = True
        try:
            if pending.event is Event.VALUE:
                self.pending = self.switch(entry.value)
            else:
                self.pending = self.switch()
        except Exception as exception:
            self.exception = exception
            self.pending = None

    def _other_step(self, entry: Entry) -> bool:
        pinned = self.iteration is not None and entry.event == Event.VALUE.name and not entry.location.endswith("()")
        return pinned and self.pending is not None and self.pending.iteration != entry.occurrence

    def _differ(self, how: str) -> None:
        error = StagesDiffer(
            f"under pipeline parallelism a block runs once on each stage and must do the same on all of them: {how}. "
            "Seed random numbers in the block, and do not let it depend on a clock or on anything outside the model"
        )
        self.halt(error)

    def halt(self, error: BaseException) -> None:
        self._fed = True
        super().halt(error)


def _short(location: Any) -> str:
    return str(location).removeprefix("model.")
