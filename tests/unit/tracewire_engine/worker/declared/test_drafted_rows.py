"""A request's rows in a step with drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tracewire_engine.worker.declared.drafted_rows import Served, pieces_of
from tracewire_engine.worker.declared.spans import Chunk


def test_each_draft_is_a_piece_of_its_own() -> None:
    whole = Chunk(4, 10, 3, 8)
    assert list(pieces_of(whole, 0)) == [(0, whole)]
    assert list(pieces_of(whole, 2)) == [(0, Chunk(4, 10, 1, 8)), (1, Chunk(5, 11, 1, 8)), (2, Chunk(6, 12, 1, 8))]


def test_drafts_are_rejected_until_they_are_known_to_be_taken() -> None:
    declaration: Any = SimpleNamespace()
    served = Served(declaration, 13, 5, drafts=3)
    assert served.rejected == 3
    served.taken = 1
    assert served.rejected == 2
