"""Preempted traces on models whose layers keep different things: sliding windows, the states of recurrent layers.

Each test starts an engine of its own, with few blocks. What its traces save, read and edit is what it is when each
runs alone, since what they had computed is kept, whatever that is.
"""

# mypy: ignore-errors

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_inside import counts, engine_inside, forgotten
from tracewire import Probe, Steer

pytestmark = pytest.mark.full

GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: By kind, how many blocks there are: more than one trace needs, fewer than four do.
BLOCKS = {"gemma3": 30, "falcon_h1": 22}
COUNT = 90


@tracewire.intervention
def edits_by_position(model, tracer, live, amount):
    """What it adds at the last position depends on the step: computed anew, caches and states would be others."""
    streams = [].save()
    for step in tracer.iter[:]:
        model.residual(1).output[-1, step % 16] += amount * (1 + step % 5)
        streams.append(model.residual(2).output.clone())


def ids(number: int, length: int) -> list[int]:
    """A prompt that shares no block with another's."""
    return [(17 * number + 7 * place + place * place) % 4000 + 1 for place in range(length)]


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed anew"])
@pytest.mark.parametrize("kind", list(BLOCKS))
async def test_preempted_traces_are_what_they_are_alone(kind: str, kept: bool, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    options = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS[kind],
        **({} if kept else {"kept_bytes": 0}),
    }
    async with engine_inside(model=path, name=kind, **options) as (engine, url), tracewire.connect(url) as client:
        model = await client.models.get(kind, timeout=30)

        def trace(number: int, edits: bool) -> Any:
            vector = np.zeros(model.info.hidden_size, np.float32)
            vector[number] = 0.5
            reads = [Probe("probed", "residual(3)", positions="all")]
            return client.trace(
                model,
                ids(number, 100 + number),
                edits_by_position(amount=2.0 + number) if edits else None,
                interventions=[*reads, Steer("residual(0)", vector, positions="last")] if edits else reads,
                max_tokens=COUNT,
                **GREEDY,
            )

        async def run(number: int, results: dict[int, Any]) -> None:
            async with trace(number, edits=kept) as running:
                results[number] = await running.result()

        alone: dict[int, Any] = {}
        together: dict[int, Any] = {}
        for number in range(1, 5):
            await run(number, alone)
        assert (await counts(engine))["preemptions"] == 0
        async with anyio.create_task_group() as group:
            for number in range(1, 5):
                group.start_soon(run, number, together)
        assert (await counts(engine))["preemptions"] > 0
        for number, one in together.items():
            assert one.token_ids == alone[number].token_ids
            assert one.saves.keys() == alone[number].saves.keys()
            for name, items in alone[number].saves.items():
                assert len(one.saves[name]) == len(items) == COUNT
                for ours, theirs in zip(one.saves[name], items, strict=True):
                    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
                    assert ours.shape == theirs.shape
                    np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02 * np.abs(theirs).max())
        await forgotten(engine)
