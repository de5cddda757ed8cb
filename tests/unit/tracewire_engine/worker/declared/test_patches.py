"""Patches of several requests at one location. `test_plan.py` compares random ones with a loop over requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Patch
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRun, LiveRuns
from tracewire_engine.worker.declared import kept_rows
from tracewire_engine.worker.declared.groups import LocationValues, Rows
from tracewire_engine.worker.declared.members import Member, Members
from tracewire_engine.worker.declared.ops import Declaration, Op, VectorCache
from tracewire_engine.worker.declared.patches import PatchGroup
from tracewire_engine.worker.declared.plan import DeclaredRequests

WIDTH = 4
CPU = torch.device("cpu")


def group(*patches: Patch, spans: list[tuple[int, int]], total: int, residual: bool = True) -> PatchGroup:
    cache = VectorCache(CPU)
    ops = [Op(Placed(one, [("at", residual)]), {}, cache) for one in patches]
    members = Members(0)
    for op, span in zip(ops, spans, strict=True):
        members.add(op, 0, [Member(cast(Any, SimpleNamespace()), op, span)])
    return PatchGroup(members, Rows(spans, total, CPU), residual, CPU)


def test_a_patched_stream_is_exactly_the_new_value_and_other_rows_are_as_they_were() -> None:
    hidden, residual = (torch.randn(6, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    before = hidden.clone(), residual.clone()
    new = np.float32(np.arange(2 * WIDTH).reshape(2, WIDTH))
    made = group(Patch("", new[0]), Patch("", new, positions=[1, 2]), spans=[(0, 1), (3, 2)], total=6)
    made.run(LocationValues((hidden, residual), "output", 6))
    assert torch.equal((hidden + residual)[[0, 3, 4]].float(), torch.tensor(new[[0, 0, 1]]))
    assert torch.equal(hidden[[1, 2, 5]], before[0][[1, 2, 5]])
    assert torch.equal(residual[[1, 2, 5]], before[1][[1, 2, 5]])


def test_one_row_is_for_all_positions() -> None:
    hidden = torch.randn(3, WIDTH)
    group(Patch("", np.ones(WIDTH, np.float32)), spans=[(0, 3)], total=3).run(LocationValues(hidden, "output", 3))
    assert torch.equal(hidden, torch.ones(3, WIDTH))


def test_each_patch_has_its_own_strength() -> None:
    hidden = torch.zeros(3, WIDTH)
    ones = np.ones(WIDTH, np.float32)
    patches = [Patch("", ones, strength=strength) for strength in (0.0, 0.25, 1.0)]
    group(*patches, spans=[(0, 1), (1, 1), (2, 1)], total=3).run(LocationValues(hidden, "output", 3))
    assert hidden[:, 0].tolist() == [0.0, 0.25, 1.0]


def test_values_of_another_width_are_refused_before_anything_is_written() -> None:
    hidden = torch.zeros(3, WIDTH)
    made = group(Patch("", np.ones(WIDTH + 1, np.float32)), spans=[(0, 1)], total=3)
    with pytest.raises(ValueError, match=r"values of \[5\] do not fit values of \[4\]"):
        made.run(LocationValues(hidden, "output", 3))
    assert not hidden.any()


def test_a_patch_beyond_its_prompt_ends_its_own_request_only() -> None:
    """As a standing edit can have one, which no prompt was compared with."""
    declared = DeclaredRequests(CPU)
    for name, position in (("short", 7), ("fits", 1)):
        placed = [Placed(one, [("a.output", True)]) for one in normalize([Patch("", np.ones(4), positions=position)])]
        run = LiveRuns().join(name, pack({}), name, name, 0)
        declared.add(name, Declaration(name, 0, msgspec.msgpack.encode(placed), run, declared.decoded))
    state: Any = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=3)
    declared.begin(["short", "fits"], {"short": 3, "fits": 3}, 6, {"short": state, "fits": state})
    hidden = torch.zeros(6, WIDTH)
    declared.hooks["a.output"].run(hidden)
    assert hidden[:, 0].tolist() == [0, 0, 0, 0, 1, 0]
    failure = declared.live["short"].failure
    assert failure is not None
    assert "position 7 is beyond the prompt of 3 tokens" in failure.message
    assert declared.live["fits"].failure is None


def test_a_prompt_with_too_many_values_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of other traces, whose values fit, give theirs, at all locations."""
    monkeypatch.setattr(kept_rows, "MOST_BYTES", 100 * WIDTH * 4)
    declared = DeclaredRequests(CPU)
    lengths = {"small": 4, "large": 60, "other": 5}
    sites = [("a.output", False), ("b.output", False)]
    for name in lengths:
        (one,) = normalize([Patch("", prompt=0, positions="prompt")])
        encoded = msgspec.msgpack.encode([Placed(one, sites, kept=(f"run of {name}", 0), gives=True)])
        declared.add(name, Declaration(name, 0, encoded, LiveRun(""), declared.decoded))
    states = {name: SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=count) for name, count in lengths.items()}
    declared.begin(list(lengths), lengths, 69, states)
    values = torch.arange(69.0)[:, None].expand(69, WIDTH).contiguous()
    for location, _ in sites:
        declared.hooks[location].run(values)
    failure = declared.live["large"].failure
    assert failure is not None
    assert "need 960 bytes, and 432 are left for them; name fewer positions or locations" in failure.message
    for name, rows in (("small", range(4)), ("other", range(64, 69))):
        assert declared.live[name].failure is None
        kept = declared.decoded.vectors.kept.of(f"run of {name}", 0)
        for location, _ in sites:
            assert kept.rows(location)[:, 0].tolist() == list(rows)
    # What the failed prompt had given is dropped.
    assert declared.decoded.vectors.kept.of("run of large", 0).nbytes == 0
