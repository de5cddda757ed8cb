"""Brings what a step reaches to the hosts of blocks. The model does not wait for the hosts whose blocks only read.

A value is copied once for all of these hosts: on a GPU to pinned memory, while the model goes on. When the step ends,
each host gets its rows of all values with one message, and values of one form are copied to its memory together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from nnsight.intervention.source import NO_SKIP
from nnsight.util import apply

from tracewire_engine.link.cuda_events import recorded
from tracewire_engine.link.shared_rows import RowMemory, aligned, pack_value
from tracewire_engine.protocol.block_host import Reached, Shape, Shared

from .row_buffer import MOST_KEPT, RowBuffer
from .rows import StepRows, Withheld

__all__ = ["Fit", "GivenShare", "HostRows", "HostShare", "Reading", "StageLayout", "Staged", "StagedStep"]

#: How many forms of values are remembered while steps are laid out alike.
_FORMS = 1024

#: How many bytes of a host's rows one message tells of at most, unless a single value has more.
_TOLD = 16 << 20


class _Form:
    """What tensors have in common whose rows a host gets in one go.

    Args:
        tensor: one of them.
        place: the axis of its rows, and whether each request has one; `None` if they are not tokens' or requests'.
        rows: the first row that is copied, and the one behind the last.
    """

    def __init__(self, tensor: torch.Tensor, place: tuple[int, bool] | None, rows: tuple[int, int]) -> None:
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.axis, self.by_request = (-1, False) if place is None else place
        self.low, self.count = (0, 1) if place is None else (rows[0], rows[1] - rows[0])
        #: Whether all of the tensor is copied.
        self.whole = place is None or self.count == tensor.shape[place[0]]
        self.size = tensor.nbytes if self.whole else tensor.nbytes // tensor.shape[self.axis] * self.count
        #: The bytes of a row.
        self.row = self.size // max(1, self.count)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is copied of a tensor."""
        return tensor if self.whole else tensor.narrow(self.axis, self.low, self.count)


class Fit(NamedTuple):
    """The rows of a host in tensors of one form: their bytes in its memory, their shape, and what takes them out."""

    size: int
    shape: tuple[int, ...]
    index: Any


class Staged(NamedTuple):
    """A tensor of a value: its form, where it is copied to, and its first byte there."""

    form: _Form
    buffer: RowBuffer
    start: int


class _Pattern(NamedTuple):
    """A value that is a tensor, or a tuple of tensors: its skeleton, the forms of tensors in it, and their places."""

    skeleton: Any
    forms: tuple[_Form, ...]
    places: tuple[int, ...]


class Reading(NamedTuple):
    """A value that the step has reached, and the hosts that want their rows of it.

    Attributes:
        forms: of the tensors.
        passed: how many locations the model had passed before.
        by_request: as in `Reached`.
        places: of the tensors, in a value that is a tuple of tensors; 0 for one that is a tensor.
    """

    location: str
    skeleton: Any
    tensors: list[Staged]
    forms: tuple[_Form, ...]
    passed: int
    by_request: bool
    hosts: Sequence[Any]
    places: tuple[int, ...] = ()


class _Reachings:
    """What a step has reached, to be compared with another step of the same layout."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        # Values of one pattern have the same skeleton. Others are never alike: 1 and True compare equal.
        self._skeletons = [one.skeleton for one in readings]
        self._others = [
            (one.location, one.forms, [tensor.start for tensor in one.tensors], one.passed, one.by_request, one.hosts)
            for one in readings
        ]

    def like(self, other: _Reachings) -> bool:
        """Whether both have reached the same locations with values of the same forms, staged at the same places."""
        return self._others == other._others and all(map(is_, self._skeletons, other._skeletons))


class GivenShare(NamedTuple):
    """What a host got of a step: its pieces, the first byte in its memory, and how many bytes they take."""

    pieces: list[_Piece]
    start: int
    size: int


class StageLayout:
    """What steps of one layout have in common: where the rows of hosts lie in the values.

    Args:
        rows: those of each of the hosts, by the host.
    """

    def __init__(self, rows: Mapping[Any, StepRows]) -> None:
        self._of_hosts = rows
        #: Any of them: all say alike which tensors have rows.
        self._rows = next(iter(rows.values()))
        bounds = [[one.bounds(by_request=by_request) for one in rows.values()] for by_request in (False, True)]
        #: The first row that any host has, and the one behind the last, by `by_request`.
        self._bounds = [(min(low for low, _ in some), max(high for _, high in some)) for some in bounds]
        self._forms: dict[Any, _Form] = {}
        self._fits: dict[tuple[Any, tuple[_Form, ...]], tuple[int, list[Fit]]] = {}
        self._patterns: dict[Any, _Pattern] = {}
        #: What the last step that was compared has reached, and what its hosts got of it, if that was one part each.
        self.reached: _Reachings | None = None
        self.given: dict[Any, GivenShare] = {}

    def has_rows(self, tensor: torch.Tensor, *, by_request: bool) -> bool:
        """Whether a tensor has a row of each token or request."""
        return self._rows.place_of(tensor, by_request=by_request) is not None

    def form(self, tensor: torch.Tensor, *, by_request: bool) -> _Form:
        """The form of a tensor."""
        place = self._rows.place_of(tensor, by_request=by_request)
        key = tensor.shape, tensor.dtype, place
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _FORMS:
                # Such as values whose shape is another one in each step.
                self._forms, self._fits, self._patterns = {}, {}, {}
            rows = (0, 0) if place is None else self._bounds[place[1]]
            form = self._forms[key] = _Form(tensor, place, rows)
        return form

    def pattern(self, value: Any, *, by_request: bool, parts: frozenset[int] | None = None) -> _Pattern | None:
        """The pattern of a value; `None` if it is neither a tensor nor a tuple of tensors. `parts`: as for `reach`."""
        tensors = value if type(value) is tuple else (value,)
        if any(type(one) is not torch.Tensor for one in tensors):
            return None
        key = (by_request, type(value), parts, *[(one.shape, one.dtype) for one in tensors])
        found = self._patterns.get(key)
        if found is None:
            every = parts is None or type(value) is not tuple
            places = tuple([at for at in range(len(tensors)) if every or at in (parts or ())])
            forms = tuple([self.form(tensors[at], by_request=by_request) for at in places])
            withheld = iter(range(len(tensors)))
            given = [one if at in places else Withheld() for at, one in enumerate(tensors)]
            skeleton = pack_value(
                tuple(given) if type(value) is tuple else value,
                lambda _: Shape("", (), 0),
                lambda one: [next(withheld), type(one).__name__],
            ).skeleton
            found = self._patterns[key] = _Pattern(skeleton, forms, places)
        return found

    def fits(self, host: Any, forms: tuple[_Form, ...]) -> tuple[int, list[Fit]]:
        """A host's rows in a value of tensors of these forms, and how many bytes they take together."""
        found = self._fits.get((host, forms))
        if found is None:
            rows = self._of_hosts[host]
            fits = [self._fit(form, rows) for form in forms]
            found = self._fits[host, forms] = sum([fit.size for fit in fits]), fits
        return found

    def _fit(self, form: _Form, rows: StepRows) -> Fit:
        if form.axis < 0:
            return Fit(aligned(form.row), form.shape, slice(0, 1))
        count = rows.count(by_request=form.by_request)
        shape = (*form.shape[: form.axis], count, *form.shape[form.axis + 1 :])
        index = rows.index(form.low, by_request=form.by_request)
        return Fit(aligned(form.row * count), shape, index)


class StagedStep:
    """The values that a step reaches, for the hosts whose blocks only read.

    Args:
        layout: of the step, for these hosts.
        pinned: whether values may lie on a GPU.
        expected: how many bytes it may come to.
    """

    _free_events: ClassVar[list[Any]] = []

    def __init__(self, layout: StageLayout, *, pinned: bool, expected: int = 0) -> None:
        self._layout, self._pinned, self._expected = layout, pinned, expected
        self.readings: list[Reading] = []
        self._buffers: list[RowBuffer] = []
        self._next = 0
        self._compared = False
        #: How many bytes are staged.
        self.size = 0
        self._copied: torch.cuda.Event | None = None
        self._users, self._done = 1, not pinned
        self._lock = threading.Lock()

    # --- what the step reaches ----------------------------------------------------------------------------------------

    def reach(
        self,
        location: str,
        value: Any,
        hosts: Sequence[Any],
        passed: int,
        *,
        by_request: bool,
        rows_only: bool = False,
        parts: frozenset[int] | None = None,
    ) -> None:
        """Take a value.

        Args:
            location: where the model has reached it.
            value: the model's, which may change later.
            hosts: that want their rows of it.
            passed: how many locations the model has passed in the step.
            by_request: as in `Reached`.
            rows_only: whether tensors without rows are withheld: nobody knows what is in them.
            parts: the items of a tuple of tensors that hosts use. The others are withheld. `None`: they may use all.

        Raises:
            SharedValueError: the value cannot be shared.
        """
        pattern = None if rows_only else self._layout.pattern(value, by_request=by_request, parts=parts)
        if pattern is not None:
            skeleton, forms, places = pattern
            values = value if type(value) is tuple else (value,)
            tensors = [self._stage(values[at], form) for at, form in zip(places, forms, strict=True)]
            self.readings.append(Reading(location, skeleton, tensors, forms, passed, by_request, hosts, places))
        else:
            self.readings.append(self._read(location, value, hosts, passed, by_request=by_request, rows_only=rows_only))

    def is_apart(self, value: Any, *, by_request: bool) -> bool:
        """Whether a value is a tensor, or some that do not share their memory: its copy can be put back as a whole."""
        if self._layout.pattern(value, by_request=by_request) is None:
            return False
        tensors = value if type(value) is tuple else (value,)
        return len({one.untyped_storage().data_ptr() for one in tensors}) == len(tensors)

    def _read(
        self, location: str, value: Any, hosts: Sequence[Any], passed: int, *, by_request: bool, rows_only: bool
    ) -> Reading:
        """Stage a value of any kind."""
        layout = self._layout
        tensors: list[Staged] = []
        others = 0

        def write(tensor: torch.Tensor) -> Shape:
            tensors.append(self._stage(tensor, layout.form(tensor, by_request=by_request)))
            return Shape("", (), 0)

        def other(one: Any) -> Any:
            nonlocal others
            if one is NO_SKIP:
                return None
            others += 1
            return [others - 1, type(one).__name__]

        def with_rows(tensor: torch.Tensor) -> Any:
            return tensor if layout.has_rows(tensor, by_request=by_request) else Withheld()

        given = apply(value, with_rows, torch.Tensor) if rows_only else value
        skeleton = pack_value(given, write, other).skeleton
        forms = tuple([one.form for one in tensors])
        return Reading(location, skeleton, tensors, forms, passed, by_request, hosts)

    def _stage(self, tensor: torch.Tensor, form: _Form) -> Staged:
        size = form.size
        if not self._buffers or self._next + size > self._buffers[-1].size:
            wanted = max(size, 2 * self.size, min(self._expected, MOST_KEPT))
            self._buffers.append(RowBuffer.take(wanted, pinned=self._pinned))
            self._next = 0
        buffer, start = self._buffers[-1], self._next
        if size:
            buffer.copy(form.kept(tensor), start)
        self._next += aligned(size)
        self.size += aligned(size)
        return Staged(form, buffer, start)

    def seal(self) -> None:
        """Take no more values."""
        if self._pinned and self._copied is None:
            self._copied = recorded(self._free_events)

    def compare(self) -> None:
        """Note whether all is as in the step before of the same layout: hosts then get what they got of that one."""
        layout, buffers = self._layout, self._buffers
        reached = _Reachings(self.readings) if len(buffers) == 1 else None
        if reached is None or layout.reached is None or not reached.like(layout.reached):
            layout.given.clear()
        layout.reached, self._compared = reached, reached is not None

    # --- what hosts get -----------------------------------------------------------------------------------------------

    def share_of(self, host: Any) -> HostShare:
        """What a host gets."""
        return HostShare(self, host)

    def given(self, host: Any) -> GivenShare | None:
        """What the host got of the last step, if this step was compared with it and is like it."""
        return self._layout.given.get(host) if self._compared else None

    def give(self, host: Any, given: GivenShare) -> None:
        """Note what the host gets, all of it in one part."""
        if self._compared:
            self._layout.given[host] = given

    @property
    def buffer(self) -> RowBuffer:
        """The one buffer of a step that is like another."""
        (buffer,) = self._buffers
        return buffer

    def fits(self, host: Any, reading: Reading) -> tuple[int, list[Fit]]:
        """A host's rows in a value, and how many bytes they take together."""
        return self._layout.fits(host, reading.forms)

    def join(self) -> None:
        """Another user needs it."""
        with self._lock:
            self._users += 1

    @property
    def done(self) -> bool:
        """Whether all values are on the host."""
        if not self._done and self._copied is not None:
            self._done = self._copied.query()
        return self._done

    def arrive(self) -> None:
        """Note that all values are on the host, as the caller knows."""
        self._done = True

    def wait(self) -> None:
        """Wait until all values are on the host."""
        if not self._done and self._copied is not None:
            self._copied.synchronize()
            self._done = True

    def leave(self) -> None:
        """One of its users needs it no more: the one that made it, or a host."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            for buffer in self._buffers:
                buffer.give_back()
            self._buffers = []
            if self._done and self._copied is not None:
                self._free_events.append(self._copied)
                self._copied = None


class HostShare:
    """What a host gets of a step."""

    def __init__(self, step: StagedStep, host: Any) -> None:
        self._step, self._host = step, host

    @cached_property
    def _readings(self) -> list[Reading]:
        return [reading for reading in self._step.readings if self._host in reading.hosts]

    def _size(self, reading: Reading) -> int:
        return self._step.fits(self._host, reading)[0]

    @property
    def given(self) -> GivenShare | None:
        """What the host got of the last step, if this one is like it."""
        return self._step.given(self._host)

    def parts(self) -> list[list[Reading]]:
        """The values of which it wants rows, in parts of which each has a message."""
        if self.given is not None:
            return [self._readings]
        parts: list[list[Reading]] = []
        size = 0
        for reading in self._readings:
            more = self._size(reading)
            if not parts or size + more > _TOLD:
                parts.append([])
                size = 0
            parts[-1].append(reading)
            size += more
        return parts

    def give(self, readings: list[Reading], memory: RowMemory) -> tuple[int, HostRows] | None:
        """Find room for a host's rows of some values.

        Args:
            readings: one of the `parts`.
            memory: where its rows go.

        Returns:
            The first byte in the memory, and the rows; `None` if the memory has no room yet.
        """
        step, given = self._step, self.given
        size = sum([self._size(reading) for reading in readings]) if given is None else given.size
        start = memory.room(size)
        if start is None:
            return None
        step.join()
        if given is not None:
            return start, HostRows(step, given.pieces, (step.buffer, start - given.start))
        pieces: list[_Piece] = []
        there = start
        for reading in readings:
            for one, fit in zip(reading.tensors, step.fits(self._host, reading)[1], strict=True):
                if not pieces or not pieces[-1].takes(one):
                    pieces.append(_Piece(one, there, fit.size, fit.index))
                there += fit.size
        if len(readings) == len(self._readings):
            step.give(self._host, GivenShare(pieces, start, size))
        return start, HostRows(step, pieces)

    def events(self, readings: list[Reading], start: int, passed: Any, before: int) -> list[Reached]:
        """What the host is told of some values.

        Args:
            readings: one of the `parts`.
            start: the first byte of its rows of them in its memory.
            passed: the numbers of the locations that the model has passed in the step.
            before: how many of these the host has been told.
        """
        events: list[Reached] = []
        for reading in readings:
            shapes = []
            for one, (size, shape, _) in zip(reading.tensors, self._step.fits(self._host, reading)[1], strict=True):
                shapes.append(Shape(one.form.dtype, shape, start))
                start += size
            told = passed[before : reading.passed].tobytes()
            events.append(Reached(reading.location, Shared(reading.skeleton, shapes), told, reading.by_request))
            # The host counts the location itself.
            before = reading.passed + 1
        return events


class _Piece:
    """Tensors of one form that lie at equal distances, of which a host gets the same rows."""

    def __init__(self, first: Staged, start: int, size: int, index: Any) -> None:
        self._form, self._first, self._distance = first.form, first, 0
        self._start, self._size, self._index = start, size, index
        self._count = 1

    def takes(self, one: Staged) -> bool:
        """Take another tensor, if it is the next at the same distance."""
        if one.form is not self._form or one.buffer is not self._first.buffer:
            return False
        first = self._first.start
        if self._count == 1 and one.start > first:
            self._distance = one.start - first
        if one.start != first + self._count * self._distance:
            return False
        self._count += 1
        return True

    def arrive(self, memory: RowMemory, buffer: RowBuffer, shift: int) -> None:
        """Copy the rows to a host's memory.

        Args:
            memory: the host's.
            buffer: where the values are.
            shift: how many bytes further they go than they did in the step that the piece was made for.
        """
        form = self._form
        if form.row:
            shape, strides = (self._count, form.count, form.row), (self._distance, form.row, 1)
            held = np.ndarray(shape, np.uint8, buffer.array, self._first.start, strides)
            memory.put_rows(held, self._index, self._start + shift, self._size)

    @property
    def buffer(self) -> RowBuffer:
        """Where the values are of the step that the piece was made for."""
        return self._first.buffer


class HostRows:
    """A host's rows of some values, on their way to its memory.

    Args:
        step: that has reached the values.
        pieces: of the rows.
        moved: if the pieces were made for an earlier step, where this step's values are, and how many bytes further
            they go.
    """

    def __init__(self, step: StagedStep, pieces: list[_Piece], moved: tuple[RowBuffer, int] | None = None) -> None:
        self._step, self._pieces, self._moved = step, pieces, moved

    @property
    def done(self) -> bool:
        """Whether `arrive` does not wait."""
        return self._step.done

    def arrive(self, memory: RowMemory) -> None:
        """Copy the rows to `memory`. Waits until all values are on the host."""
        self._step.wait()
        for piece in self._pieces:
            piece.arrive(memory, *(self._moved or (piece.buffer, 0)))
        self.drop()

    def drop(self) -> None:
        """Give up the rows."""
        self._step.leave()
