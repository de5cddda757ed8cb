"""What a tap's kernel does with a row, by the row's flags."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.declared.tap_rows import ADD, AFTER, READ, SUM, serve_rows

POOL = torch.tensor([[10.0, 20.0], [30.0, 40.0]])


@pytest.mark.parametrize(
    ("flags", "value", "copied"),
    [
        (0, [1.0, 2.0], [-1.0, -1.0]),
        (READ, [1.0, 2.0], [1.0, 2.0]),
        (READ | SUM, [1.0, 2.0], [6.0, 7.0]),
        (ADD, [31.0, 42.0], [-1.0, -1.0]),
        (READ | ADD, [31.0, 42.0], [1.0, 2.0]),
        (READ | ADD | AFTER, [31.0, 42.0], [31.0, 42.0]),
        (READ | SUM | ADD | AFTER, [31.0, 42.0], [36.0, 47.0]),
    ],
)
def test_a_row_is_served_by_its_flags(flags: int, value: list[float], copied: list[float]) -> None:
    hidden, residual, buffer = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.full((2, 2), 5.0), torch.full((4, 2), -1.0)
    serve_rows(hidden, residual, buffer, POOL, torch.tensor([0, flags, 0, 0]), torch.tensor([0, 1, 0, 0]))
    assert hidden.tolist() == [[0.0, 0.0], value]
    assert buffer.tolist() == [[-1.0, -1.0], copied, [-1.0, -1.0], [-1.0, -1.0]]


def test_a_value_of_one_tensor_is_its_own_sum() -> None:
    hidden, buffer = torch.ones(1, 2), torch.zeros(2, 2)
    serve_rows(hidden, None, buffer, POOL, torch.tensor([READ | SUM, 0]), torch.zeros(2))
    assert buffer.tolist() == [[1.0, 1.0], [0.0, 0.0]]
