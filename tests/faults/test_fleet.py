"""Engines that join, drain and are killed under load: each trace ends once, as it should, and the work is spread."""

from __future__ import annotations

import pytest

from benchmarks.fleet import Phase, Shape, run


def judge(phases: list[Phase], shape: Shape) -> None:
    """What must hold of a run, however fast the machine is."""
    burst, steady, changing = phases
    for phase in phases:
        assert phase.violations == []
        assert phase.finished == phase.traces
    assert (steady.traces, changing.traces) == (shape.steady, shape.traces)
    # Nothing happened to the fleet, so nothing ran twice.
    assert burst.attempts == burst.traces
    assert steady.attempts == steady.traces
    each = shape.steady / shape.engines
    assert all(each / 3 < count < each * 3 for count, _, _ in steady.engines.values()), steady.engines
    left = [how for _, _, how in changing.engines.values()]
    assert left.count("drained") == left.count("killed") == shape.rounds
    assert len(left) == shape.engines + 2 * shape.rounds
    # Whoever joined was given work.
    assert all(count for count, during, _ in changing.engines.values() if during > 1), changing.engines
    # A drain costs nobody an attempt; a kill, those that it hit.
    assert changing.attempts - changing.traces <= shape.rounds * shape.capacity


async def test_nothing_is_lost_or_doubled_while_engines_come_and_go() -> None:
    """Two models, whose engines one client sees, and engines that are taken for gone after five seconds."""
    shape = Shape(
        traces=160, steady=80, models=2, pace=40.0, rounds=1, lease=5.0, patience=0.5, certain=6.0, clients=2, seed=7
    )
    judge(await run(shape), shape)


@pytest.mark.full
async def test_two_thousand_traces_while_engines_come_and_go() -> None:
    """With an engine's own times: its lease is five seconds."""
    shape = Shape()
    judge(await run(shape), shape)
