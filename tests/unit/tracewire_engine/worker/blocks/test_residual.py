"""Readings of the residual stream: what a block changes in place, the layer gets."""

from __future__ import annotations

import pytest
import torch

from tracewire_engine.worker.blocks.residual import ResidualReads


def _halves() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])


def test_a_reading_is_a_value_of_its_own() -> None:
    hidden, residual = _halves()
    reads = ResidualReads()
    read = reads.read(hidden, residual)
    assert read.tolist() == [[11.0, 22.0]]
    reads.write_back()
    assert (hidden.tolist(), residual.tolist()) == ([[1.0, 2.0]], [[10.0, 20.0]])
    assert not reads


def test_what_is_changed_in_place_becomes_the_stream() -> None:
    hidden, residual = _halves()
    reads = ResidualReads()
    reads.read(hidden, residual)[0, 0] = 5.0
    reads.write_back()
    assert (hidden + residual).tolist() == [[5.0, 22.0]]


def test_a_layer_of_one_tensor_is_written_as_it_is() -> None:
    hidden, _ = _halves()
    reads = ResidualReads()
    reads.read(hidden, None).mul_(2)
    reads.write_back()
    assert hidden.tolist() == [[2.0, 4.0]]


def test_a_later_reading_has_what_an_earlier_one_changed() -> None:
    hidden, residual = _halves()
    reads = ResidualReads()
    reads.read(hidden, residual).add_(1)
    again = reads.read(hidden, residual)
    assert again.tolist() == [[12.0, 23.0]]


def test_two_readings_that_would_undo_each_other_are_refused() -> None:
    hidden, residual = _halves()
    reads = ResidualReads()
    one, two = reads.read(hidden, residual), reads.read(hidden, residual)
    one.add_(1)
    two.add_(2)
    with pytest.raises(RuntimeError, match="read twice"):
        reads.write_back()
    assert not reads


def test_a_replacement_counts_and_earlier_readings_do_not() -> None:
    hidden, residual = _halves()
    reads = ResidualReads()
    early = reads.read(hidden, residual)
    reads.replace(hidden, residual, torch.tensor([[7.0, 8.0]]))
    early.zero_()
    reads.write_back()
    assert (hidden + residual).tolist() == [[7.0, 8.0]]
