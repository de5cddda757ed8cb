"""The rows of a step that a patch changes, where its prompt is computed whole and in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tracewire_bus.wire.messages import Patch, Probe, Steer
from tracewire_engine.worker.declared.ops import Declaration, Op
from tracewire_engine.worker.declared.spans import Chunk, spans_of


def spans(one: Any, chunk: Chunk, *, rows: int = 1, seen: int = 0) -> list[tuple[int, int, int]]:
    op = SimpleNamespace(one=one, matrix=torch.zeros(rows, 4), reads=isinstance(one, Probe))
    return spans_of(cast(Op, op), cast(Declaration, SimpleNamespace(seen=seen)), chunk)


def test_runs_of_positions_are_spans_with_their_place_among_the_values() -> None:
    patch = Patch("", None, positions=[1, 2, 4, 3])
    assert spans(patch, Chunk(10, 0, 6, 6), rows=4) == [(11, 2, 0), (14, 1, 2), (13, 1, 3)]
    assert spans(patch, Chunk(10, 0, 3, 6), rows=4) == [(11, 2, 0)]
    assert spans(patch, Chunk(0, 3, 3, 6), rows=4) == [(1, 1, 2), (0, 1, 3)]
    assert spans(patch, Chunk(0, 6, 1, 6), rows=4) == []


def test_named_positions_are_those_of_other_edits() -> None:
    assert spans(Patch("", None, positions="generated"), Chunk(3, 4, 2, 5)) == [(4, 1, 0)]
    ((start, count, _),) = spans(Steer("", None, positions="last"), Chunk(0, 0, 5, 5))
    assert spans(Patch("", None, positions="last"), Chunk(0, 0, 5, 5)) == [(start, count, 0)]


def test_a_prompt_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 7 is beyond the prompt of 5 tokens"):
        spans(Patch("", None, positions=7), Chunk(0, 0, 5, 5))
    with pytest.raises(ValueError, match="2 rows for 5 positions"):
        spans(Patch("", None, positions="prompt"), Chunk(0, 0, 5, 5), rows=2)


def test_a_position_that_was_read_is_not_read_again() -> None:
    """The number that goes with the rows of a read is the position of the first."""
    assert spans(Probe("p", "", positions="all"), Chunk(0, 0, 5, 5), seen=3) == [(3, 2, 3)]
    assert spans(Probe("p", ""), Chunk(0, 0, 3, 5)) == []
