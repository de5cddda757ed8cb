"""A trace's rows of a value, and what its blocks leave in their place: its own rows and no others."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from nnsight.intervention.source import NO_SKIP

from tracewire_engine.link.shared_rows import RowMemory, SharedValueError, unpack_value
from tracewire_engine.protocol.block_host import Reply, Shape, Shared
from tracewire_engine.worker.block_host.left_values import Left, merged
from tracewire_engine.worker.block_host.rows import SharedRows, StepRows
from tracewire_engine.worker.block_host.staged_step import StagedStep, StageLayout

#: Tokens 0, 3 and 4 of five, in the first and the third of three requests.
ROWS = StepRows([(0, 1), (3, 2)], [0, 2], 5, 3)


def given(value: Any, **how: bool) -> Any:
    """The value that the host of `ROWS` gets."""
    step, memory = StagedStep(StageLayout({"host": ROWS}), pinned=False), RowMemory.create(1 << 16)
    step.reach("", value, ["host"], 0, **{"by_request": False, "rows_only": False, **how})
    share = step.share_of("host")
    (readings,) = share.parts()
    found = share.give(readings, memory)
    assert found is not None
    start, rows = found
    (event,) = share.events(readings, start, array("H"), 0)
    rows.arrive(memory)
    return unpack_value(event.value, lambda _, shape: memory.read(shape), lambda other: other)


def write_back(shared: SharedRows, reply: Reply, memory: RowMemory) -> None:
    failed: list[Exception] = []
    merged(None, [Left("host", shared, reply, memory)], lambda _, error: failed.append(error))
    if failed:
        raise failed[0]


def sent(tensor: torch.Tensor) -> tuple[Shape, RowMemory]:
    memory = RowMemory.create(1 << 16)
    start = memory.room(tensor.nbytes)
    assert start is not None
    memory.write(tensor, start)
    return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start), memory


def test_a_trace_sees_its_own_rows() -> None:
    tokens = torch.arange(10.0).view(5, 2)
    found = given((tokens, tokens[None], tokens[:3], torch.ones(7), None, NO_SKIP, object()))
    assert found[0].tolist() == tokens[[0, 3, 4]].tolist()
    assert found[1].tolist() == tokens[None, [0, 3, 4]].tolist()
    assert found[2].tolist() == tokens[[0, 2]].tolist()
    assert found[3].tolist() == [1.0] * 7
    assert found[4:6] == (None, None)
    assert found[6] == [0, "object"]
    found = given(torch.arange(3), by_request=True)
    assert found.tolist() == [0, 2]


def test_rows_changed_in_place_change_no_others() -> None:
    tokens = torch.zeros(5, 2)
    shared = SharedRows((tokens,), ROWS, by_request=False)
    shape, memory = sent(torch.ones(3, 2))
    write_back(shared, Reply(edited=[(0, shape)]), memory)
    assert tokens[:, 0].tolist() == [1, 0, 0, 1, 1]


def test_a_replacement_makes_a_new_value() -> None:
    tokens = torch.zeros(5, 2)
    value = (tokens, 7)
    shared = SharedRows(value, ROWS, by_request=False)
    shape, memory = sent(torch.ones(3, 2))
    found = shared.replace(value, Reply(replaced=Shared([1, [0, 0], 8], [shape])), memory, {})
    assert tokens.sum() == 0
    assert found[0][:, 0].tolist() == [1, 0, 0, 1, 1]
    # What is no tensor stays.
    assert found[1] == 7


@pytest.mark.parametrize("wrong", [torch.ones(2, 2), torch.ones(3, 2, dtype=torch.float64), torch.ones(3)])
def test_rows_of_another_shape_are_refused(wrong: torch.Tensor) -> None:
    tokens = torch.zeros(5, 2)
    shared = SharedRows((tokens,), ROWS, by_request=False)
    shape, memory = sent(wrong)
    with pytest.raises(SharedValueError):
        write_back(shared, Reply(edited=[(0, shape)]), memory)
    with pytest.raises(SharedValueError):
        write_back(shared, Reply(edited=[(1, shape)]), memory)
    for skeleton in ([1, [0, 0]], 5, [1, None], [3, ["a", [0, 0]]]):
        with pytest.raises(SharedValueError):
            shared.replace((tokens,), Reply(replaced=Shared(skeleton, [shape])), memory, {})
    assert tokens.sum() == 0


def test_what_belongs_to_no_request_is_not_changed() -> None:
    table = torch.zeros(7)
    shared = SharedRows(table, ROWS, by_request=False)
    shape, memory = sent(torch.ones(7))
    write_back(shared, Reply(edited=[(0, shape)]), memory)
    assert table.sum() == 0


def test_of_operations_only_rows_are_shared() -> None:
    tokens, other = torch.arange(10.0).view(5, 2), torch.ones(7)
    value = (tokens, other, {"scale": other})
    shared = SharedRows(value, ROWS, by_request=False, rows_only=True)
    found = given(value, rows_only=True)
    assert found[0].tolist() == tokens[[0, 3, 4]].tolist()
    assert found[1:] == ([0, "Withheld"], {"scale": [1, "Withheld"]})
    shape, sent_memory = sent(torch.zeros(3, 2))
    reply = Reply(replaced=Shared([1, [0, 0], [4, [0]], [3, ["scale", [4, [1]]]]], [shape]))
    left = shared.replace(value, reply, sent_memory, {})
    assert left[0].sum() == tokens[[1, 2]].sum()
    assert left[1] is other
    assert left[2]["scale"] is other


def test_a_tensor_is_changed_once_and_tensors_lie_apart() -> None:
    tokens, others = torch.zeros(5, 2), torch.zeros(5, 2)
    shared = SharedRows((tokens, others), ROWS, by_request=False)
    shape, memory = sent(torch.ones(3, 2))
    for edited in ([(0, shape), (0, shape)], [(0, shape), (1, shape)]):
        with pytest.raises(SharedValueError):
            write_back(shared, Reply(edited=edited), memory)
    with pytest.raises(SharedValueError, match="share their memory"):
        shared.replace((tokens, others), Reply(replaced=Shared([1, [0, 0], [0, 1]], [shape, shape])), memory, {})
    assert tokens.sum() + others.sum() == 0
