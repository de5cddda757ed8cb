"""Tensors in shared memory, and what a process may not claim of them."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import pytest
import torch

from tracewire_engine.link.shared_rows import RowMemory, SharedValueError, pack_value, unpack_value
from tracewire_engine.protocol.block_host import Shape, Shared


def written(memory: RowMemory, tensor: torch.Tensor) -> Shape:
    start = memory.room(tensor.nbytes)
    assert start is not None
    memory.write(tensor, start)
    return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 4),
        torch.arange(4).to(torch.bfloat16),
        (torch.ones(2), None, [1, 2.5, "x"], {"a": torch.zeros(1), "b": True}),
    ],
)
def test_values_go_and_come(value: Any) -> None:
    memory = RowMemory.create(1 << 20)
    shared = pack_value(value, lambda tensor: written(memory, tensor), lambda other: None)
    found = unpack_value(shared, lambda _, shape: memory.read(shape), lambda given: None)
    assert repr(found) == repr(value)


def test_memory_is_used_in_turns_and_never_twice_at_once() -> None:
    memory = RowMemory.create(16 << 20)
    held: list[tuple[int, torch.Tensor, Shape]] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        size = int(torch.randint(1, 3 << 18, (1,), generator=generator))
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
        while memory.room(size) is None:
            mark, expected, shape = held.pop(0)
            assert torch.equal(memory.read(shape), expected)
            memory.returned = mark
        # `room` has given these bytes out; the next ones are as good.
        while (start := memory.room(size)) is None:
            mark, expected, shape = held.pop(0)
            assert torch.equal(memory.read(shape), expected)
            memory.returned = mark
        memory.write(tensor, start)
        held.append((memory.taken, tensor, Shape("uint8", (size,), start)))
    for _, expected, shape in held:
        assert torch.equal(memory.read(shape), expected)
    assert memory.room(17 << 20) is None


def test_memory_that_was_written_a_moment_ago_comes_first() -> None:
    memory = RowMemory.create(1 << 20)
    size = 64 << 10
    starts, marks = [], []
    for _ in range(3):
        starts.append(memory.room(size))
        marks.append(memory.taken)
    assert starts == [0, size, 2 * size]
    memory.returned = marks[0]
    assert memory.room(size) == 0
    # The second and the third are still read.
    assert memory.room(size) == 3 * size
    memory.returned = marks[2]
    assert memory.room(size) == size


@pytest.mark.parametrize("behind", [1, 2, 3, 15, 100])
def test_a_reader_that_is_behind_keeps_nobody_waiting_while_there_is_room(behind: int) -> None:
    size, marks = 64 << 10, deque[int]()
    memory = RowMemory.create((behind + 1) * size)
    most = 0
    for _ in range(3 * behind + 20):
        if len(marks) > behind:
            memory.returned = marks.popleft()
        start = memory.room(size)
        assert start is not None
        most = max(most, start)
        marks.append(memory.taken)
    assert most == behind * size
    assert memory.room(size) is None


@pytest.mark.parametrize("size", [1, 8, 13, 64])
@pytest.mark.parametrize("changed", [0, -1])
def test_each_byte_counts(size: int, changed: int) -> None:
    memory = RowMemory.create(1 << 16)
    tensor = torch.arange(2 * size, dtype=torch.uint8)[::2]
    shape = written(memory, tensor)
    assert memory.equals(tensor, shape)
    tensor[changed] += 1
    assert not memory.equals(tensor, shape)


def test_equality_is_of_bytes() -> None:
    memory = RowMemory.create(1 << 16)
    tensor = torch.tensor([float("nan"), 1.0])
    shape = written(memory, tensor)
    assert memory.equals(tensor, shape)
    tensor[1] = -1.0
    assert not memory.equals(tensor, shape)


def test_the_memory_keeps_its_size() -> None:
    memory = RowMemory.create(1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)


@pytest.mark.parametrize(
    "shape",
    [
        Shape("float32", (1 << 20,), 0),
        Shape("float32", (-1,), 0),
        Shape("float32", (4,), -64),
        Shape("float32", (4,), 1),
        Shape("float32", (4,), 1 << 16),
        Shape("object", (1,), 0),
        Shape("nothing", (1,), 0),
    ],
)
def test_no_tensor_lies_outside(shape: Shape) -> None:
    with pytest.raises(SharedValueError):
        RowMemory.create(1 << 16).read(shape)


@pytest.mark.parametrize("skeleton", [[], [0], [0, 1], [0, -1], [0, "x"], [9, 1], [3, 1], [3, [1]], [4], [4, 1, 2]])
def test_no_other_skeleton_is_a_value(skeleton: Any) -> None:
    shared = Shared(skeleton, [Shape("float32", (1,), 0)])
    with pytest.raises(SharedValueError):
        unpack_value(shared, lambda _, shape: torch.zeros(1), lambda given: given)


def test_values_do_not_nest_without_end() -> None:
    deep: Any = 1
    node: Any = 1
    for _ in range(40):
        deep, node = [deep], [2, node]
    with pytest.raises(SharedValueError):
        pack_value(deep, lambda tensor: Shape("", (), 0), lambda other: None)
    with pytest.raises(SharedValueError):
        unpack_value(Shared(node, []), lambda _, shape: torch.zeros(1), lambda given: given)
    with pytest.raises(SharedValueError):
        pack_value(2**70, lambda tensor: Shape("", (), 0), lambda other: None)
