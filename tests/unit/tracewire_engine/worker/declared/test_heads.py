"""Attention heads against the same done row by row: reads, ablations and patches, whole and on ranks of their own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import HeadAblate, HeadProbe, Patch
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import Placed
from tracewire_engine.worker.blocks.live_params import LiveRuns
from tracewire_engine.worker.declared.groups import LocationValues
from tracewire_engine.worker.declared.heads import HeadSlots
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

HEADS, SIZE = 4, 3
CPU = torch.device("cpu")
AT = "o_proj.input"


def declared(*requests: list[Any], prompt: int = 3) -> DeclaredRequests:
    """A step in which each request computes its prompt of three tokens, with these interventions."""
    made = DeclaredRequests(CPU)
    state: Any = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=prompt)
    for number, interventions in enumerate(requests):
        placed = [Placed(one, [(AT, False)], False, (HEADS, SIZE)) for one in normalize(interventions)]
        run = LiveRuns().join(str(number), pack({}), str(number), str(number), 0)
        made.add(str(number), Declaration(str(number), 0, msgspec.msgpack.encode(placed), run, made.decoded))
    names = [str(number) for number in range(len(requests))]
    made.begin(names, dict.fromkeys(names, prompt), prompt * len(names), dict.fromkeys(names, state))
    return made


def served(made: DeclaredRequests, values: torch.Tensor, shard: int = -1) -> None:
    made.hooks[AT].run(((values,), {}), shard)
    assert not any(one.failure for one in made.live.values())


def expected(one: Any, rows: torch.Tensor) -> None:
    """What an edit means for the prompt's rows `[3, heads, size]`, in place."""
    heads = [one.heads] if isinstance(one.heads, int) else one.heads
    for place, head in enumerate(heads):
        if isinstance(one, HeadAblate):
            mean = torch.zeros(SIZE) if one.mean is None else torch.tensor(np.atleast_2d(one.mean))
            mean = mean[place % len(mean)] if mean.dim() == 2 else mean
            rows[:, head] = mean + one.keep * (rows[:, head] - mean)
        else:
            for row, position in enumerate(one.positions):
                new = torch.tensor(one.values[row if one.values.ndim == 3 else slice(None)])[place]
                rows[position, head] += one.strength * (new - rows[position, head])


def edits(rng: random.Random) -> list[Any]:
    heads: Any = rng.choice([2, [0], [3, 1], [0, 1, 2, 3]])
    count = 1 if isinstance(heads, int) else len(heads)
    values = np.random.default_rng(rng.randint(0, 9)).standard_normal((2, count, SIZE)).astype(np.float32)
    positions = rng.choice([[0, 2], [2, 0], [1, 2]])
    found = [
        HeadAblate("", heads, keep=rng.choice([0.0, 0.5, 2.0])),
        HeadAblate("", heads, keep=rng.choice([0.0, 0.5]), mean=values[0]),
        HeadAblate("", heads, mean=values[0, 0]),
        Patch("", values, heads=heads, positions=positions),
        Patch("", values[1], heads=heads, positions=positions, strength=0.25),
    ]
    return rng.sample(found, rng.randint(1, 3))


@pytest.mark.parametrize("seed", range(20))
def test_edits_are_what_a_loop_over_heads_does_whole_and_in_shards(seed: int) -> None:
    rng = random.Random(seed)
    requests = [edits(rng) for _ in range(rng.randint(1, 5))]
    values = torch.randn(3 * len(requests), HEADS * SIZE, generator=torch.Generator().manual_seed(seed))
    wanted = values.clone().view(-1, 3, HEADS, SIZE)
    for request, rows in zip(requests, wanted, strict=True):
        for one in request:
            expected(one, rows)
    whole = values.clone()
    served(declared(*requests), whole)
    torch.testing.assert_close(whole.view_as(wanted), wanted)
    # Two ranks with two heads each.
    halves = [half.contiguous() for half in values.chunk(2, -1)]
    for shard, half in enumerate(halves):
        made = declared(*requests)
        assert made.hooks[AT].by_head
        served(made, half, shard)
    torch.testing.assert_close(torch.cat(halves, -1), whole, rtol=0, atol=0)


def test_a_replaced_head_is_exactly_the_new_one_and_the_others_are_as_they_were() -> None:
    values = torch.randn(3, HEADS * SIZE, dtype=torch.bfloat16)
    before = values.clone()
    new = torch.randn(1, SIZE).bfloat16()
    served(declared([Patch("", new.float().numpy(), heads=2)]), values)
    assert torch.equal(values[2, 2 * SIZE : 3 * SIZE], new[0])
    before[2, 2 * SIZE : 3 * SIZE] = new[0]
    assert torch.equal(values, before)


def test_reads_come_in_the_order_asked_for() -> None:
    made = declared(
        [
            HeadProbe("all", "", positions="all"),
            HeadProbe("some", "", heads=[3, 0]),
            HeadProbe("norm", "", heads=1, reduce="norm"),
        ]
    )
    values = torch.randn(3, HEADS * SIZE, dtype=torch.bfloat16)
    served(made, values)
    heads = values.view(3, HEADS, SIZE)
    found = {collector.one.name: collector.found[0] for collector in cast(Any, made.plan).collectors}
    assert torch.equal(found["all"], heads)
    assert torch.equal(found["some"], heads[2:, [3, 0]])
    assert found["norm"].dtype == torch.float32
    torch.testing.assert_close(found["norm"], heads[2:, 1:2].float().norm(dim=-1))
    # The model may write its memory anew before the reads leave the device.
    values.zero_()
    assert found["all"].any()
    assert not made.hooks[AT].by_head


def test_values_that_are_no_such_heads_are_refused() -> None:
    slots = HeadSlots([0], HEADS, SIZE)
    for width, shard in ((13, -1), (2 * SIZE, -1), (3 * SIZE, 0)):
        location = LocationValues(torch.zeros(2, width), "output", 2, shard=shard)
        with pytest.raises(ValueError, match=rf"4 heads of 3 do not fit values of \[{width}\]"):
            slots.here(location)
    assert [
        list(part) for part in HeadSlots([3, 1], HEADS, SIZE).here(LocationValues(torch.zeros(2, 12), "output", 2))
    ] == [
        [3, 1],
        [0, 1],
    ]
