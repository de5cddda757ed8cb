"""A request's rows in a step with drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.support.drafted_kinds import DRAFTED, WIDTH
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Probe
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared.drafted_rows import Served, pieces_of
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests
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


#: Edits that add sums of products to the stream: a batch of other rows rounds these otherwise.
SUMS = [name for name, kind in DRAFTED.items() if any(getattr(one, "name", "").startswith("near_") for one in kind(0))]


def _edited(name: str, numbers: list[int], drafts: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a stream behind the edit of this kind, of requests that have so many drafts each."""
    declared, runs = DeclaredRequests(torch.device("cpu")), LiveRuns()
    states = {}
    for place, number in enumerate(numbers):
        request = f"r{place}"
        (edit,) = (one for one in normalize(DRAFTED[name](number)) if not isinstance(one, Probe))
        placed = msgspec.msgpack.encode([Placed(edit, [("layer.0.output", True)], False)])
        run = runs.join(request, pack({}), request, request, 0)
        declared.add(request, Declaration(request, 0, placed, run, declared.decoded))
        states[request] = SimpleNamespace(num_computed_tokens=9, num_prompt_tokens=5)
    scheduled = dict.fromkeys(states, 1 + drafts)
    tried = {request: [-1] * drafts for request in states} if drafts else {}
    declared.begin(list(states), scheduled, len(rows), states, tried)
    halves = rows.clone(), torch.zeros_like(rows)
    declared.hooks["layer.0.output"].run(halves)
    assert not any(one.failure for one in declared.live.values())
    return halves[0] + halves[1]


@pytest.mark.parametrize("name", SUMS)
def test_a_drafted_row_is_the_same_bit_for_bit_as_one_of_as_many_undrafted_rows(name: str) -> None:
    """Each kind whose edit is rounded otherwise in a batch of other rows, in bfloat16."""
    rows = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    drafted = _edited(name, [0, 1], 3, rows)
    undrafted = _edited(name, [0] * 4 + [1] * 4, 0, rows)
    assert not torch.equal(drafted, rows)
    assert torch.equal(drafted, undrafted)
