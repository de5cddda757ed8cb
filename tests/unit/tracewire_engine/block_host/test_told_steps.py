"""A step that is like the one before, as a host is told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tracewire_engine.block_host.expected_value import ExpectedValue
from tracewire_engine.block_host.told_steps import RepeatedStep, ToldSteps, ValueChanged
from tracewire_engine.link.shared_rows import RowMemory, aligned, pack_value
from tracewire_engine.protocol.block_host import Arrived, Began, Ended, Event, Reached, Repeated, Shape, Steered

#: How many bytes a step's rows lie behind those of the step before.
STRIDE = 1 << 16


class Steps:
    """Writes steps of some values into shared memory, and has a host read what it is told of them."""

    def __init__(self) -> None:
        self.memory = RowMemory.create(1 << 21)
        self.told = ToldSteps()

    def write(self, values: list[Any], start: int) -> list[Event]:
        """Write the values from byte `start` on. Returns what is told of a step that reaches them."""
        place = start

        def write(tensor: torch.Tensor) -> Shape:
            nonlocal place
            at, place = place, place + aligned(tensor.nbytes)
            self.memory.write(tensor, at)
            return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at)

        reached = [
            Reached(f"at{i}", pack_value(value, write, lambda _: None), bytes([i, 0]), by_request=bool(i % 2))
            for i, value in enumerate(values)
        ]
        return [Began([Arrived("r", {})], [("r", 1, 4), ("s", 1, 7)]), *reached, Ended(b"\x09\x00")]

    def begin(self, values: list[Any]) -> list[Event]:
        """Tell of a first step."""
        step = self.write(values, 0)
        assert list(self.told.events(step)) == step
        return step

    def repeat(self, values: list[Any], number: int) -> RepeatedStep:
        """Tell of another step, of which the values are these."""
        self.write(values, number * STRIDE)
        (step,) = self.told.events([Repeated(number * STRIDE)])
        assert isinstance(step, RepeatedStep)
        return step

    def read(self, step: RepeatedStep) -> list[Any]:
        """All of its values."""
        return [value for _, value in step.values(self.memory, lambda one: one)]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        one, other = list(one.items()), list(other.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


VALUES: dict[str, Callable[[], list[Any]]] = {
    "tensors of one form": lambda: [tensor(2, 16) for _ in range(20)],
    "tuples of one form": lambda: [(tensor(2, 16), tensor(2, 16)) for _ in range(11)],
    "forms in turns": lambda: [(tensor(2, 16), tensor(1, 8, dtype=torch.bfloat16)) for _ in range(3)],
    "a form that goes on in the next value": lambda: [tensor(4, 4), (tensor(4, 4), tensor(2, 2)), tensor(2, 2)],
    "gaps": lambda: [tensor(3, dtype=torch.int8) for _ in range(5)],
    "large": lambda: [tensor(64, 64) for _ in range(3)],
    "other values": lambda: [[tensor(2, 2), 1, None], {"a": tensor(2, 2)}, (tensor(2, 2), "x"), [3]],
    "nothing in them": lambda: [tensor(0, 4), tensor(0, 4), tensor(2, 4)],
    "no values": list,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_repeated_step_has_the_next_tokens_and_its_own_rows(name: str) -> None:
    steps = Steps()
    first = steps.begin(VALUES[name]())
    for number in (1, 2, 3):
        values = VALUES[name]()
        step = steps.repeat(values, number)
        assert step.began == Began([], [("r", 1, 4 + number), ("s", 1, 7 + number)])
        assert step.passed == b"\x09\x00"
        assert not step.new
        found = list(step.values(steps.memory, lambda one: one))
        assert all(map(alike, [value for _, value in found], values))
        assert [event for event, _ in found] == first[1:-1]


def test_items_that_are_no_tensors_keep_their_places() -> None:
    steps = Steps()
    steps.begin([(tensor(2, 16), object(), tensor(3), object()) for _ in range(5)])
    values = [(tensor(2, 16), object(), tensor(3), object()) for _ in range(5)]
    found = steps.read(steps.repeat(values, 1))
    assert [(one[1], one[3]) for one in found] == [(None, None)] * 5
    assert all(alike((one[0], one[2]), (value[0], value[2])) for one, value in zip(found, values, strict=True))


def test_values_of_one_form_are_copied_together() -> None:
    steps = Steps()
    steps.begin([tensor(2, 16) for _ in range(20)])
    copies = {one.untyped_storage().data_ptr() for one in steps.read(steps.repeat([tensor(2, 16)] * 20, 1))}
    assert len(copies) == 5


@pytest.mark.parametrize("name", ["tensors of one form", "tuples of one form", "forms in turns", "large"])
def test_a_change_of_any_value_is_noticed(name: str) -> None:
    count = len(VALUES[name]())
    for changed in range(count):
        steps = Steps()
        steps.begin(VALUES[name]())
        step = steps.repeat(VALUES[name](), 1)
        with pytest.raises(ValueChanged):
            for place, (_, value) in enumerate(step.values(steps.memory, lambda one: one)):
                if place == changed:
                    (value if isinstance(value, torch.Tensor) else value[-1]).add_(1)


def scaled(value: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a value, each with what is expected of it: twice as much of the first, and the others as is."""
    tensors = list(value) if isinstance(value, tuple) else [value]
    return [(one, one.clone() if place else one * 2) for place, one in enumerate(tensors)]


def keep_the_first(one: torch.Tensor, copy: torch.Tensor) -> None:
    """Take it that the block of the first row is over."""
    copy[0] = one[0]


def keep_none(one: torch.Tensor, copy: torch.Tensor) -> None:
    """Take it that no block is over."""


def expect_all(_: Reached, value: Any) -> ExpectedValue:
    return ExpectedValue(scaled(value), keep_none)


@pytest.mark.parametrize("name", ["tensors of one form", "tuples of one form", "forms in turns", "large"])
def test_a_value_that_is_left_as_expected_has_not_changed(name: str) -> None:
    values = VALUES[name]()
    for expecting in range(len(values)):
        steps = Steps()
        steps.begin(VALUES[name]())
        step = steps.repeat(VALUES[name](), 1)
        place = -1

        def expect(reached: Reached, value: Any, at: str = f"at{expecting}") -> ExpectedValue | None:
            return ExpectedValue(scaled(value), keep_none) if reached.location == at else None

        for place, (_, value) in enumerate(step.values(steps.memory, lambda one: one, expect)):
            if place == expecting:
                (value[0] if isinstance(value, tuple) else value).mul_(2)
        assert place == len(values) - 1


#: What a block does to the first tensor of a value, which it should scale by two, and to the last one.
OTHERWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "nothing": lambda first, last: None,
    "too much": lambda first, last: first.mul_(3),
    "one number more": lambda first, last: (first.mul_(2), first[-1, -1:].add_(1)),
    "another tensor of the value": lambda first, last: (first.mul_(2), last.add_(1)),
}


@pytest.mark.parametrize("name", ["tuples of one form", "forms in turns"])
@pytest.mark.parametrize("how", OTHERWISE)
def test_a_value_that_is_left_otherwise_has_changed(name: str, how: str) -> None:
    steps = Steps()
    steps.begin(VALUES[name]())
    step = steps.repeat([(first + 1, last + 1) for first, last in VALUES[name]()], 1)
    with pytest.raises(ValueChanged):
        for place, (_, (first, last)) in enumerate(step.values(steps.memory, lambda one: one, expect_all)):
            first.mul_(2) if place != 1 else OTHERWISE[how](first, last)


def test_what_blocks_that_are_over_leave_of_an_expected_value_is_not_compared() -> None:
    for row, changed in ((0, False), (1, True)):
        steps = Steps()
        steps.begin([tensor(2, 16)])
        step = steps.repeat([tensor(2, 16) + 1], 1)
        served = step.values(steps.memory, lambda one: one, lambda _, one: ExpectedValue(scaled(one), keep_the_first))
        _, value = next(served)
        value.mul_(2)
        value[row] += 5
        if changed:
            with pytest.raises(ValueChanged):
                next(served)
        else:
            assert next(served, None) is None


def test_beside_an_expected_value_another_one_may_not_change() -> None:
    """Also if both were copied together."""
    steps = Steps()
    steps.begin([tensor(2, 16), tensor(2, 16)])
    step = steps.repeat([tensor(2, 16), tensor(2, 16)], 1)

    def expect(reached: Reached, value: Any) -> ExpectedValue | None:
        return ExpectedValue(scaled(value), keep_none) if reached.location == "at0" else None

    with pytest.raises(ValueChanged):
        for place, (_, value) in enumerate(step.values(steps.memory, lambda one: one, expect)):
            value.add_(1) if place else value.mul_(2)


def test_the_last_whole_step_is_repeated_in_whatever_turns_it_was_told() -> None:
    steps = Steps()
    for event in steps.write([tensor(2, 2)], 0):
        assert list(steps.told.events([event])) == [event]
    # One that has only begun is none.
    list(steps.told.events([Began([], [("s", 1, 8)])]))
    assert steps.repeat([tensor(2, 2)], 1).began == Began([], [("r", 1, 5), ("s", 1, 8)])


def test_a_step_of_other_values_takes_the_place_of_the_last_one() -> None:
    steps = Steps()
    steps.begin([tensor(2, 2)])
    steps.repeat([tensor(2, 2)], 1)
    assert list(steps.told.events([Steered(b"")])) == [Steered(b"")]
    list(steps.told.events(steps.write([tensor(3), tensor(3)], 0)))
    values = [tensor(3), tensor(3)]
    assert all(map(alike, steps.read(steps.repeat(values, 2)), values))
