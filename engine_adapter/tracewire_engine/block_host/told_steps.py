"""The events of steps as a host is told of them, and those of a step that is like the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from tracewire_engine.link.shared_rows import OPAQUE, RowMemory, size_of, tensors_alone, unpack_value
from tracewire_engine.protocol.block_host import Arrived, Began, Ended, Event, Reached, Repeated, Shape

from .expected_value import ExpectedValue, same_values

__all__ = ["RepeatedStep", "ToldSteps", "ValueChanged"]

#: How many tensors one copy brings at most, and of how many bytes together, unless one has more. A block that keeps one
#: of them without copying it keeps them all.
_TOGETHER, _TOGETHER_BYTES = 4, 256 << 10


class ValueChanged(RuntimeError):
    """A block has changed a value of a step otherwise than the model has gone on with, so that the change is lost."""

    def __init__(self) -> None:
        super().__init__("a block has changed a value in another way than its source was taken to")


class _Value(NamedTuple):
    """A value of a step.

    Attributes:
        reached: as the host was told of it.
        kind: see `tensors_alone`.
        copies: what is copied before it is served: each is one tensor, or several of one dtype and shape as one.
        ends: whether all tensors that have been copied belong to this value or to those before.
    """

    reached: Reached
    kind: str
    copies: list[Shape]
    ends: bool


class RepeatedStep:
    """A step that is like an earlier one.

    Args:
        events: of the earlier step.
    """

    def __init__(self, events: list[Began | Reached | Ended]) -> None:
        reached = [event for event in events if isinstance(event, Reached)]
        shapes = [shape for event in reached for shape in event.value.tensors]
        self._values = _values(reached, shapes)
        self._first = shapes[0].start if shapes else 0
        self._start = 0
        began, ended = events[0], events[-1]
        assert isinstance(began, Began)
        assert isinstance(ended, Ended)
        #: How it begins, and what the model has passed when it ends (see `Ended`).
        self.began, self.passed = began, ended.passed

    @property
    def new(self) -> list[Arrived]:
        """The new requests of the step: none."""
        return self.began.new

    def at(self, start: int) -> RepeatedStep:
        """The next step like it, whose first row is at byte `start`."""
        self.began = Began([], [(request, count, index + 1) for request, count, index in self.began.spans])
        self._start = start
        return self

    def values(
        self,
        memory: RowMemory,
        other: Callable[[Any], Any],
        expect: Callable[[Reached, Any], ExpectedValue | None] = lambda *_: None,
    ) -> Iterator[tuple[Reached, Any]]:
        """The step's values, each to be served before the next one is asked for.

        Args:
            memory: where the rows are.
            other: as `unpack_value` takes it.
            expect: is given each value before it is served. Returns what the worker leaves of it.

        Raises:
            ValueChanged: a value that was served has changed, and is not as the worker leaves it.
        """
        further = self._start - self._first
        tensors: list[torch.Tensor] = []
        copied: list[tuple[torch.Tensor, Shape, list[torch.Tensor]]] = []
        expected: list[tuple[torch.Tensor, torch.Tensor]] = []
        for reached, kind, copies, ends in self._values:
            for dtype, shape, start in copies:
                there = Shape(dtype, shape, start + further)
                copy = memory.read(there)
                parts = list(copy.unbind(0))
                copied.append((copy, there, parts))
                tensors += parts
            count = len(reached.value.tensors)
            own, tensors = tensors[:count], tensors[count:]
            value = _value_of(reached, kind, own, other)
            known = expect(reached, value)
            yield reached, value
            if known is not None:
                expected += [(one, left) for one in own if (left := known.of(one)) is not None]
            if ends:
                for copy, there, parts in copied:
                    if not _is_as_expected(memory, copy, there, parts, expected):
                        raise ValueChanged
                copied.clear()
                expected.clear()


def _value_of(reached: Reached, kind: str, own: list[torch.Tensor], other: Callable[[Any], Any]) -> Any:
    """A value that is served, made of its tensors."""
    if kind == "tensor":
        return own[0]
    if kind == "tuple":
        return tuple(own)
    if kind == "parts":
        rest, items = iter(own), reached.value.skeleton[1:]
        return tuple([other(item[1]) if item[0] == OPAQUE else next(rest) for item in items])
    return unpack_value(reached.value, partial(_taken, own), other)


def _is_as_expected(
    memory: RowMemory,
    copy: torch.Tensor,
    there: Shape,
    parts: list[torch.Tensor],
    expected: list[tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    """Whether a copy is as it was, but for the parts of which others are expected."""
    known = [(place, left) for place, part in enumerate(parts) for one, left in expected if one is part]
    if not known:
        return memory.equals(copy, there)
    wanted = memory.read(there)
    for place, left in known:
        wanted[place] = left
    return same_values(copy, wanted)


class ToldSteps:
    """Remembers the last whole step, which `Repeated` repeats."""

    def __init__(self) -> None:
        self._step: list[Began | Reached | Ended] = []
        self._last: list[Began | Reached | Ended] = []
        self._repeated: RepeatedStep | None = None

    def events(self, told: list[Event]) -> Iterator[Event | RepeatedStep]:
        """The events that a host is told, with a step in place of each `Repeated`."""
        for event in told:
            if isinstance(event, Repeated):
                self._repeated = self._repeated or RepeatedStep(self._last)
                yield self._repeated.at(event.start)
                continue
            if isinstance(event, Began):
                self._step = [event]
            elif isinstance(event, Reached):
                self._step.append(event)
            elif isinstance(event, Ended):
                self._step.append(event)
                self._last, self._step, self._repeated = self._step, [], None
            yield event


def _taken(tensors: list[torch.Tensor], index: int, _: Shape) -> torch.Tensor:
    return tensors[index]


def _values(reached: list[Reached], shapes: list[Shape]) -> list[_Value]:
    """The values of a step, with what is copied for each."""
    copies = _copies(shapes)
    found: list[_Value] = []
    served = copied = 0
    for event in reached:
        served += len(event.value.tensors)
        own: list[Shape] = []
        while copied < served:
            own.append(copies[len(own)])
            copied += own[-1].shape[0]
        del copies[: len(own)]
        found.append(_Value(event, tensors_alone(event.value), own, copied == served))
    return found


def _copies(shapes: list[Shape]) -> list[Shape]:
    """What is copied for these tensors, in their order: those of one dtype and shape that lie side by side as one."""
    found: list[Shape] = []
    end = 0
    for dtype, shape, start in shapes:
        size = size_of(Shape(dtype, shape, start))
        last = found[-1] if found else None
        if last is not None and last.dtype == dtype and last.shape[1:] == tuple(shape) and end == start:
            count = last.shape[0] + 1
            if count <= _TOGETHER and count * size <= _TOGETHER_BYTES:
                found[-1] = Shape(dtype, (count, *shape), last.start)
                end = start + size
                continue
        found.append(Shape(dtype, (1, *shape), start))
        end = start + size
    return found
