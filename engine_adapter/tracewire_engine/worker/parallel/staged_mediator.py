"""Blocks under pipeline parallelism: every stage runs the block, and each is told what the others served.

A stage's forward pass comes by its own modules only. A block parks at locations of all of them, so its copy on a stage
also parks at locations that this stage will never come by. Each stage therefore keeps a log of what it served to the
block (what was asked, where, and the value) and sends it to the others, whose copies are fed from it as if the model
had come by:

    stage 0    forward of step t ──┬──────────────────────────▶  before its next step with that request: fed by stage 1
                                   │ log: what stage 0 served                 ▲
    stage 1                        └▶ fed by stage 0, forward of step t, samples ┘ log: what stage 1 served

Logs go over the CPU group of vLLM's pipeline group, beside the activations. Only what blocks asked for travels, and a
step in which nobody shares anything sends nothing. Whether a step does is known to every stage alike, from what the
scheduler has told all of them and what the logs have told since, so that no stage waits for a log that nobody sends.

The copies must do the same. Where one takes another way than its log (a random number that the block did not seed, a
clock), or fails alone, the request fails on all stages. The last stage samples and has been told everything, so it
alone reports.
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

#: Where every copy is served by itself.
_OURS = (LIVE, RESULT, None)

#: The kind of a log's entry that `tracer.cache()` recorded; all others are nnsight's events.
_CACHED = "CACHED"


class StagesDiffer(RuntimeError):
    """A block did something else on one pipeline stage than on another."""


class Entry(NamedTuple):
    """One thing that a stage served to a block: the event's name, where, at which occurrence, and the value read.

    `order` counts what the stage served, to whichever block: it is served in the same order elsewhere.
    """

    event: str
    location: str
    occurrence: int
    value: Any
    order: int = 0


def _kept(value: Any) -> Any:
    """A served value as it is now: the block, and the model after it, may change it in place."""
    return apply(value, torch.clone, torch.Tensor)


class _LoggedCache(CopyingCache):
    """A `tracer.cache()` that also sees what passes on other stages."""

    def _record(self, path: str, key: str, value: Any) -> None:
        super()._record(path, key, value)
        mediator: StagedMediator = self.__dict__["mediator"]
        mediator.note(_CACHED, path, mediator.caches.index(self), (key, value))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "mediator"}


class _Random:
    """Torch's random numbers for one block: the same on all stages, whose generators other requests use differently."""

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
        #: Values that other stages served and that this copy has not got yet.
        self.incoming: deque[Entry] = deque()
        #: The live parameters of the step that the block is at, which may be behind the one that the model is at.
        self.live_values: dict[str, Any] | None = None
        self._fed = False
        self._random = _Random(0)
        #: How often each location had been passed when the block began to wait for a later stage's module.
        self._waited: tuple[str, dict[str, int]] | None = None

    @property
    def over(self) -> bool:
        """Whether the block will ask for nothing more."""
        if self.exception is not None:
            return True
        return self.worker is not None and self.worker.dead and not self.caches

    def name(self, request: str) -> None:
        """Say whose block it is, on all stages alike, before it is started."""
        self._random = _Random(zlib.crc32(request.encode()))

    def begin_step(self) -> None:
        """The model begins a step with this request."""
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
        """Enter in the log what this stage has served."""
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
        # Not counted here: a module is taken to be passed once a step.
        steps: int = self.occurrence(LIVE)
        return max(0, steps if owner < topology.index or topology.catching_up else steps - 1)

    def _check_passed(self, location: str) -> None:
        """Refuse what the model has come by here while the block waited for a later stage."""
        assert self._waited is not None
        module, passed = self._waited
        before, now = passed.get(location, 0), self.occurrence(location)
        asked = before if self.iteration is None else self.iteration
        if before <= asked < now:
            topology: Topology = self.interleaver.topology
            raise OtherStage(
                f"{_short(location)} is on pipeline stage {topology.index}, and the model had passed it before "
                f"{_short(module)}, which stage {topology.owner(f'{module}()')} holds, could be called in this step: "
                "ask for what is on earlier stages before calling modules of later ones"
            )

    def called(self, path: str, result: Any) -> None:
        """The block has called a module that this stage holds, and others do not."""
        self.note(Event.VALUE.name, f"{path}()", 0, _kept(result))

    def calls_elsewhere(self, path: str) -> None:
        """The block calls a module that another stage holds; what it returned there will be fed.

        Raises:
            OtherStage: an earlier one's, which has done its part of this step.
        """
        topology: Topology = self.interleaver.topology
        owner = topology.owner(f"{path}()")
        assert owner is not None
        if owner < topology.index:
            if not self.incoming or self.incoming[0].location != f"{path}()":
                raise OtherStage(
                    f"{_short(path)} is on pipeline stage {owner}, which has done its part of this step: it can be "
                    f"called only before the block asks for anything of stage {topology.index}"
                )
        elif self._waited is None:
            counts, start = self.interleaver.counts, self.counts_at_start
            self._waited = path, {where: count - start.get(where, 0) for where, count in counts.items()}

    # --- fed by other stages ----------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Serve the first of what is `incoming`. Raises nothing: see `exception`."""
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
                self._differ(f"it has ended here, and asked for {_short(entry.location)} on another stage")
            self.incoming.clear()
            return
        if pending.provider != entry.location or pending.event.name != entry.event or self._other_step(entry):
            self._differ(f"it asks for {_short(pending)} here, and for {_short(entry.location)} on another stage")
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
            "Seed random numbers in the block, and let nothing depend on a clock or on what is outside the model"
        )
        self.halt(error)

    def halt(self, error: BaseException) -> None:
        self._fed = True
        super().halt(error)


def _short(location: Any) -> str:
    return str(location).removeprefix("model.")
