"""Rows of several requests that are read and written together."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.declared.groups import Rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spans", "total", "rows"),
    [
        ([(0, 2), (2, 1)], 3, [0, 1, 2]),
        ([(1, 1), (4, 2)], 6, [1, 4, 5]),
        ([(4, 1), (0, 1)], 5, [4, 0]),
    ],
    ids=["all of a step", "some", "in another order"],
)
def test_the_rows_of_requests_are_taken_and_put_back(spans: list[tuple[int, int]], total: int, rows: list[int]) -> None:
    # A step may be padded beyond its rows.
    values = torch.arange(8.0).reshape(8, 1)
    some = Rows(spans, total, CPU)
    assert some.take(values).flatten().tolist() == rows
    some.put(values, lambda taken: taken + 100)
    assert values.flatten().tolist() == [row + 100 if row in rows else row for row in map(float, range(8))]


def test_all_rows_of_a_step_are_a_view_of_it() -> None:
    values = torch.zeros(4, 2)
    assert Rows([(0, 3)], 3, CPU).take(values).data_ptr() == values.data_ptr()
    assert Rows([(0, 1), (1, 1)], 2, CPU).single
    assert not Rows([(0, 2)], 2, CPU).single


def test_what_is_put_back_has_the_dtype_of_where_it_goes() -> None:
    values = torch.zeros(3, 1, dtype=torch.bfloat16)
    Rows([(2, 1)], 3, CPU).put(values, lambda taken: taken.float() + 1.5)
    assert values.flatten().tolist() == [0.0, 0.0, 1.5]
