"""What several hosts leave at one location: changes in place first, then replacements; an error costs its host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tracewire_engine.link.shared_rows import CopiedRows, RowBytes
from tracewire_engine.protocol.block_host import Reply, Shared
from tracewire_engine.worker.block_host import left_values
from tracewire_engine.worker.block_host.left_values import Left, merged
from tracewire_engine.worker.block_host.rows import SharedRows, StepRows


def left(owner: str, value: torch.Tensor, row: int, **reply: Any) -> Left[str]:
    """What a host with one request leaves in place (`edited`) or instead (`replaced`)."""
    copies = CopiedRows()
    shapes = {name: copies.add(rows) for name, rows in reply.items()}
    found = Reply()
    if "edited" in shapes:
        found.edited = [(0, shapes["edited"])]
    if "replaced" in shapes:
        found.replaced = Shared([0, 0], [shapes["replaced"]])
    rows = StepRows([(row, 1)], [row], 4, 4)
    return Left(owner, SharedRows(value, rows, by_request=False), found, RowBytes(copies.bytes()))


def test_all_rows_are_put_in() -> None:
    value = torch.zeros(4, 2)
    failed: list[str] = []
    found = merged(
        value,
        [
            left("replaces", value, 0, replaced=torch.full((1, 2), 2.0)),
            left("edits", value, 1, edited=torch.ones(1, 2)),
            left("too wide", value, 2, replaced=torch.ones(1, 3)),
            left("of no use", value, 3, edited=torch.ones(2, 2), replaced=torch.ones(1, 2)),
        ],
        lambda owner, _: failed.append(owner),
    )
    assert failed == ["of no use", "too wide"]
    assert found[:, 0].tolist() == [2, 1, 0, 0]
    # The model's own tensor has what was changed in place alone.
    assert value[:, 0].tolist() == [0, 1, 0, 0]


def test_rows_that_cannot_be_put_in_cost_their_own_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.zeros(4, 2)
    put_in = left_values._put_in

    def fails(tensor: torch.Tensor, parts: list[Any]) -> None:
        if any(one.owner == "fails" for one, _ in parts):
            raise MemoryError("no memory")
        put_in(tensor, parts)

    monkeypatch.setattr(left_values, "_put_in", fails)
    failed: list[str] = []
    ones = torch.ones(1, 2)
    given = [
        left("one", value, 0, edited=ones),
        left("fails", value, 1, edited=ones, replaced=3 * ones),
        left("two", value, 2, edited=2 * ones),
    ]
    found = merged(value, given, lambda owner, _: failed.append(owner))
    assert failed == ["fails"]
    assert found[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_hosts_that_lie_between_each_other_are_put_in_and_others_stay(axis: int) -> None:
    rows = {"one": StepRows([(0, 1), (4, 2)], [0, 3], 9, 5), "two": StepRows([(1, 2), (7, 1)], [1, 4], 9, 5)}
    value = torch.zeros(9, 2, dtype=torch.bfloat16)
    found = []
    for owner, own in rows.items():
        copies = CopiedRows()
        given = torch.arange(6, dtype=torch.bfloat16).view(3, 2) + (1 if owner == "one" else 11)
        shape = copies.add(given if axis == 0 else given[None])
        shared = SharedRows(value if axis == 0 else value[None], own, by_request=False)
        found.append(Left(owner, shared, Reply(edited=[(0, shape)]), RowBytes(copies.bytes())))
    merged(value, found, lambda owner, error: pytest.fail(f"{owner}: {error}"))
    assert value[:, 0].tolist() == [1, 11, 13, 0, 3, 5, 0, 15, 0]
