"""Rows of several requests that are read and written together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tracewire_bus.wire.messages import LogitLens
from tracewire_engine.worker.declared.groups import Collector, Rows

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


@pytest.mark.parametrize(("at_once", "calls"), [(0, [15]), (4, [4, 4, 4, 3]), (15, [15]), (16, [15])])
def test_a_lens_has_the_logits_of_so_many_rows_at_once(at_once: int, calls: list[int]) -> None:
    """Of all positions and locations together, and comes to the same tokens."""
    generator = torch.Generator().manual_seed(1)
    # Sums of whole numbers are exact, and no two logits of a row are equal.
    head = torch.cat([torch.randint(-9, 9, (40, 7), generator=generator), torch.arange(40)[:, None]], 1).float()
    sites = [torch.randint(-9, 9, (5, 8), generator=generator).float() for _ in range(3)]
    for site in sites:
        site[:, 7] = 1000.0
    # A condition does not hold at the second position.
    sites[1][1] = float("nan")
    made: list[int] = []

    def lens(values: torch.Tensor) -> torch.Tensor:
        made.append(len(values))
        return values @ head.T

    rows: Any = SimpleNamespace(counts=[2, 3], owners=None)
    collector = Collector([], rows, LogitLens("l", "residual(*)", top_k=3, positions="all"), 3, True, 0)
    collector.found = list(sites)
    found = collector.results(lens, at_once)
    assert found is not None
    assert made == calls
    logits, indices = (torch.stack(sites, 1) @ head.T).topk(3, dim=-1)
    indices[1, 1] = -1
    assert torch.equal(found["logits"].nan_to_num(-1e9), logits.nan_to_num(-1e9))
    assert torch.equal(found["token_ids"], indices.to(torch.int32))


def test_a_rank_without_logits_makes_the_same_calls() -> None:
    made: list[int] = []
    rows: Any = SimpleNamespace(counts=[5], owners=None)
    collector = Collector([], rows, LogitLens("l", "residual(0)", positions="all"), 1, False, 0)
    collector.found = [torch.ones(5, 8)]
    assert collector.results(lambda values: made.append(len(values)), 2) is None  # type: ignore[func-returns-value]
    assert made == [2, 2, 1]
