"""Conditions of declared interventions, evaluated on the device for the rows of all requests at once.

What a condition depends on lies in tensors that keep their places while a plan lasts, so that recorded kernels find it:

- `Signals` has, for each request and condition on a probe, whether the condition holds, and for each controller the
  probe's value. The group that reads the probe writes them (`Watch`), whatever the locations of the interventions.
- Its `tick` is how many steps the plan has served before this one: a row's token index is that of the plan's first step
  plus the tick.
- `Windows` has the last token ids up to each row's own.

`RowCondition` makes of them a mask of a group's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import torch

from tracewire_bus.domain.condition_checks import MAX_TOKENS
from tracewire_bus.domain.value_checks import MAX_INDEX
from tracewire_bus.wire.messages import When

__all__ = ["RowCondition", "Signals", "Watch", "Windows", "condition_key", "filled", "made_patterns", "on_device"]

#: No limit of a token's index.
_EVER: Final = MAX_INDEX
#: An id of a pattern that any token matches, and one that no token has.
_ANY, _NONE = -1, -2


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to the device without waiting for the device's work."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def condition_key(when: When | None) -> tuple[Any, ...]:
    """Equal for conditions that are evaluated alike, so that their interventions can share a group."""
    if when is None:
        return ()
    ranged = when.start is not None or when.stop is not None or when.every is not None
    return ("when", when.probe is not None, ranged, bool(when.tokens), when.part)


class Signals:
    """Numbers of live requests that steps leave for later steps, each in a slot of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: `[slots]`: the values of probes, and the state of each condition or controller.
        self.values = torch.zeros(0, device=device)
        self.states = torch.zeros(0, 2, device=device)
        #: int32 `[slots, MAX_TOKENS]`: the last token ids of requests before the step.
        self.tokens = torch.zeros(0, MAX_TOKENS, dtype=torch.int32, device=device)
        self.tick = torch.zeros((), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A slot, cleared. May move all slots, so plans must be made anew."""
        if not self._free:
            count = len(self.values)
            more = max(16, count)
            self._free = list(range(count + more - 1, count - 1, -1))
            self.values, self.states = (
                torch.cat([one, torch.zeros(more, *one.shape[1:], device=self.device)])
                for one in (self.values, self.states)
            )
            fresh = torch.full((more, MAX_TOKENS), _NONE, dtype=torch.int32, device=self.device)
            self.tokens = torch.cat([self.tokens, fresh])
        slot = self._free.pop()
        self.values[slot] = float("nan")
        self.states[slot] = 0.0
        self.tokens[slot] = _NONE
        return slot

    def forget_tokens(self, slot: int) -> None:
        """Forget a request's last token ids: it is computed from its first token on."""
        self.tokens[slot] = _NONE

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots."""
        self._free += slots


class Watch:
    """Writes what depends on the numbers of one group of probes, when they are read.

    Args:
        signals: where to.
        entries: for each, the place of its number among all numbers of the group, its slot, and its condition; `None`
            for a controller, which takes the number itself.
    """

    def __init__(self, signals: Signals, entries: Sequence[tuple[int, int, When | None]]) -> None:
        device = signals.device
        self._signals = signals
        self._places = on_device(torch.tensor([place for place, _, _ in entries], dtype=torch.int64), device)
        self._slots = on_device(torch.tensor([slot for _, slot, _ in entries], dtype=torch.int64), device)
        bounds = np.array([_bounds(when) for _, _, when in entries], np.float32).reshape(len(entries), 4)
        self._bounds = on_device(torch.from_numpy(np.ascontiguousarray(bounds.T)), device)

    def write(self, numbers: torch.Tensor) -> None:
        """Take the numbers of the group in this step, float32 of any shape."""
        signals = self._signals
        found = numbers.reshape(-1).float().index_select(0, self._places)
        above, below, keep_above, keep_below = self._bounds
        held = signals.states.index_select(0, self._slots)
        now = (found > above) | (found < below)
        now |= (held[:, 0] > 0) & ((found > keep_above) | (found < keep_below))
        # A number that was left out changes nothing.
        left_out = found.isnan()
        state = torch.where(left_out, held[:, 0], now.float())
        signals.states.index_copy_(0, self._slots, torch.stack([state, held[:, 1]], 1))
        before = signals.values.index_select(0, self._slots)
        signals.values.index_copy_(0, self._slots, torch.where(left_out, before, found))


def _bounds(when: When | None) -> tuple[float, float, float, float]:
    """Above and below which numbers a condition begins to hold, and goes on holding."""
    most = float("inf")
    if when is None:
        return most, -most, most, -most
    above = most if when.above is None else float(when.above)  # type: ignore[arg-type]
    below = -most if when.below is None else float(when.below)  # type: ignore[arg-type]
    if when.release is None:
        return above, below, most, -most
    release = float(when.release)  # type: ignore[arg-type]
    return above, below, release if when.above is not None else most, release if when.below is not None else -most


class Windows:
    """The last token ids up to each row of a step.

    Args:
        signals: has the last ids before the step, by slot.
        spans: for each request that needs them: its slot, its first row, and how many rows.
        total: rows of the step.
        ids: returns the step's token ids `[at least total]`, at the same address in each step of a plan.
    """

    def __init__(
        self, signals: Signals, spans: Sequence[tuple[int, int, int]], total: int, ids: Callable[[], torch.Tensor]
    ) -> None:
        self._signals, self._total, self._ids = signals, total, ids
        self.rows = torch.full((total, MAX_TOKENS), _NONE, dtype=torch.int32, device=signals.device)
        self._current = False
        self._spans = spans
        #: Of each window of a row that has one: where its ids lie in the step's ids, then the slots' ids.
        places, owners, slots, lasts = [], [], [], []
        for slot, start, count in spans:
            for row in range(count):
                owners.append(start + row)
                places.append(
                    [
                        start + row - lag if row >= lag else total + slot * MAX_TOKENS + MAX_TOKENS + row - lag
                        for lag in range(MAX_TOKENS - 1, -1, -1)
                    ]
                )
            slots.append(slot)
            lasts.append(start + count - 1)
        device = signals.device
        self._places = on_device(torch.tensor(places, dtype=torch.int64), device)
        self._owners = on_device(torch.tensor(owners, dtype=torch.int64), device)
        self._slots = on_device(torch.tensor(slots, dtype=torch.int64), device)
        self._lasts = on_device(torch.tensor(lasts, dtype=torch.int64), device)
        self._used = False

    def ids(self) -> torch.Tensor:
        """The id of each row's own token: `[total]`."""
        return self._ids()[: self._total]

    def again(self) -> None:
        """Make the windows of this step anew when they are needed: what made them was recorded, and not run."""
        self._current = False

    def take(self) -> torch.Tensor:
        """The windows of all rows, int32 `[total, MAX_TOKENS]`, the row's own token last."""
        if not self._current:
            self._current = self._used = True
            known = torch.cat([self._ids()[: self._total].to(torch.int32), self._signals.tokens.view(-1)])
            self.rows.index_copy_(0, self._owners, known[self._places])
        return self.rows

    def shorten(self, rejected: Mapping[int | None, int]) -> None:
        """Leave out the last rows of requests in `end_step`: by slot, how many are drafts that were not taken."""
        lasts = [start + count - 1 - rejected.get(slot, 0) for slot, start, count in self._spans]
        self._lasts = on_device(torch.tensor(lasts, dtype=torch.int64), self._signals.device)

    def end_step(self) -> None:
        """Note the last ids of the step that was served."""
        self._current = False
        if self._used:
            self._signals.tokens.index_copy_(0, self._slots, self.rows.index_select(0, self._lasts))


class RowCondition:
    """Where the conditions of a group's members hold.

    Args:
        signals: what conditions on probes have come to.
        members: for each: its slot (of a condition on a probe), its condition, the index of the token that its first
            row samples in the plan's first step, how many rows from the first on are in the prompt, and how many there
            are.
        windows: of the step, if a condition needs them.
        rows: the group's row numbers in the step.
        patterns: of each member, by `made_patterns`, if the conditions have patterns.
    """

    def __init__(
        self,
        signals: Signals,
        members: Sequence[tuple[int, When, int, int, int]],
        windows: Windows | None,
        rows: np.ndarray[Any, Any],
        patterns: Sequence[np.ndarray[Any, Any] | None] = (),
    ) -> None:
        device, first = signals.device, members[0][1]
        self._signals, self._windows = signals, windows
        counts = [count for *_, count in members]
        index = np.concatenate([np.arange(begin, begin + count) for _, _, begin, _, count in members])
        #: Whether each row may be acted on at all, as far as it is known beforehand; `None` if all may.
        allowed = np.ones(len(index), bool)
        answers = np.concatenate([np.arange(count) >= prompt for *_, prompt, count in members])
        if first.part is not None:
            allowed &= answers if first.part == "answer" else ~answers
        if first.probe is not None:
            allowed &= index >= 0
        self._allowed = None if allowed.all() else on_device(torch.from_numpy(allowed), device)
        self._count = len(index)
        self._slots = self._range = self._patterns = None
        if first.probe is not None:
            slots = np.repeat([slot for slot, *_ in members], counts)
            self._slots = on_device(torch.from_numpy(slots.astype(np.int64)), device)
        if first.start is not None or first.stop is not None or first.every is not None:
            self._range = _Range([when for _, when, *_ in members], counts, index, device)
        if first.tokens:
            self._patterns = _spread_patterns(patterns, counts, device)
            self._rows = on_device(torch.from_numpy(rows), device)

    @property
    def always(self) -> bool:
        """Whether the condition holds at all rows, in all steps of the plan."""
        within = self._range is None or self._range.always
        return within and self._allowed is None and self._slots is None and self._patterns is None

    @property
    def ranged(self) -> bool:
        """Whether the mask depends on how many steps the plan has had."""
        return self._range is not None

    @property
    def known_before(self) -> bool:
        """Whether the mask of a step is known before the step is computed: it depends on no probe."""
        return self._slots is None

    def mask(self) -> torch.Tensor:
        """Whether the condition holds at each row of the group: bool `[rows]`."""
        parts = [] if self._allowed is None else [self._allowed]
        if self._slots is not None:
            parts.append(self._signals.states.index_select(0, self._slots)[:, 0] > 0)
        if self._range is not None:
            parts += self._range.parts(self._signals.tick)
        if self._patterns is not None:
            parts.append(self._matches(self._patterns))
        if not parts:
            parts.append(torch.ones(self._count, dtype=torch.bool, device=self._signals.device))
        return reduce(torch.logical_and, parts)

    def _matches(self, patterns: torch.Tensor) -> torch.Tensor:
        assert self._windows is not None
        longest = patterns.shape[-1]
        if longest == 1:
            # No earlier token counts.
            return (patterns.squeeze(-1) == self._windows.ids().index_select(0, self._rows).unsqueeze(-1)).any(-1)
        windows = self._windows.take()[:, -longest:].index_select(0, self._rows).unsqueeze(1)
        return ((patterns == windows) | (patterns == _ANY)).all(-1).any(-1)


class _Range:
    """Which rows are within the ranges of their members: as bounds of the plan's tick, of those parts that there are.

    Args:
        conditions: of the members.
        counts: rows of each member.
        index: of the token that each row samples in the plan's first step.
    """

    def __init__(
        self, conditions: Sequence[When], counts: Sequence[int], index: np.ndarray[Any, Any], device: torch.device
    ) -> None:
        ranges = np.array([_range(when) for when in conditions], np.int64)
        start, stop, every = np.repeat(ranges, counts, 0).T
        after = index - start
        #: The tick from which on a row is in its range, and at which it is not any more.
        #: From the rows of a prompt, the greatest index is further away than a number of 32 bits can say.
        since = np.minimum(-after, _EVER)
        self._from = on_device(torch.from_numpy(since.astype(np.int32)), device) if (after < 0).any() else None
        until = np.minimum(stop - index, _EVER)
        self._until = on_device(torch.from_numpy(until.astype(np.int32)), device) if (stop < _EVER).any() else None
        self._every = self._after = None
        if (every > 1).any():
            self._every = on_device(torch.from_numpy(np.ascontiguousarray(every)), device)
            self._after = on_device(torch.from_numpy(after), device)

    @property
    def always(self) -> bool:
        """Whether all rows are in their ranges in all steps of the plan."""
        return self._from is None and self._until is None and self._every is None

    def parts(self, tick: torch.Tensor) -> list[torch.Tensor]:
        """What must hold of each row."""
        found = []
        if self._from is not None:
            found.append(tick >= self._from)
        if self._until is not None:
            found.append(tick < self._until)
        if self._every is not None and self._after is not None:
            found.append((self._after + tick) % self._every == 0)
        return found


def _range(when: When) -> tuple[int, int, int]:
    return when.start or 0, _EVER if when.stop is None else when.stop, when.every or 1


def made_patterns(when: When | None) -> np.ndarray[Any, Any] | None:
    """The sequences of ids of a condition, if it has any: int32 `[sequences, tokens]`."""
    if when is None or not when.tokens:
        return None
    longest = max(map(len, when.tokens))
    if all(len(sequence) == longest for sequence in when.tokens):
        return np.array(when.tokens, np.int32)
    found = np.full((len(when.tokens), longest), _ANY, np.int32)
    for place, sequence in enumerate(when.tokens):
        found[place, longest - len(sequence) :] = sequence
    return found


def _spread_patterns(
    patterns: Sequence[np.ndarray[Any, Any] | None], counts: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The sequences of ids of each row: int32 `[rows, sequences, tokens]`, or with one row if all have the same."""
    places: dict[int, int] = {}
    own: list[np.ndarray[Any, Any]] = []
    owners = []
    for one in patterns:
        assert one is not None
        if id(one) not in places:
            places[id(one)] = len(own)
            own.append(one)
        owners.append(places[id(one)])
    most, longest = (max(one.shape[side] for one in own) for side in (0, 1))
    found = np.full((len(own), most, longest), _NONE, np.int32)
    for place, one in enumerate(own):
        found[place, : len(one)] = _ANY
        found[place, : len(one), longest - one.shape[1] :] = one
    on = on_device(torch.from_numpy(found), device)
    if len(own) == 1:
        return on
    return on.index_select(0, on_device(torch.from_numpy(np.repeat(np.array(owners, np.int64), counts)), device))


def filled(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with NaN (-1 where they are integers) in the rows where `mask` is false."""
    nothing = float("nan") if values.is_floating_point() else -1
    return torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, nothing)
