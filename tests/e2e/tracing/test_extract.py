"""Directions on the demo model: extraction finds its direction again, and the sweep its scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT
from tracewire import Client, Live, Probe, Steer

DEMO = ROOT / "examples" / "demo_model"
FIGURES = json.loads((DEMO / "direction.json").read_text())
DIRECTION = np.load(DEMO / "direction.npy")


@pytest.fixture(scope="module")
def demo() -> Any:
    """The module that made the demo's direction."""
    from tests.examples.test_examples import module_of

    sys.path.insert(0, str(DEMO))
    try:
        yield module_of(DEMO / "direction.py")
    finally:
        sys.path.remove(str(DEMO))


async def test_the_demos_direction_and_its_scores_are_found_again(client: Client, demo: Any) -> None:
    code, prose = demo.documents_by_kind(FIGURES["documents"])
    # As examples/demo_model/direction.py reads them: the mean over tokens 8 to 255 of each document.
    options: Any = {"token": "mean", "positions": slice(demo.SKIP, demo.LENGTH), "at": "residual(3:6)"}
    found = await client.extract("demo", code, prose, layer=demo.LAYER, **options)
    cosine = float(found.vector @ DIRECTION)
    print(f"cosine {cosine:.5f}, distance {found.direction.distance:.3f}, {found.score}")
    assert cosine > 0.999
    assert found.direction.distance == pytest.approx(FIGURES["distance"], rel=0.01)
    assert found.score.auroc > 0.93

    prompts = [json.loads(line) for line in (DEMO / "prompts.txt").read_text().splitlines() if line.strip()]
    names = ("unsteered", "towards_code", "towards_prose")
    strengths = [FIGURES[name]["strength"] for name in names]
    sampling: Any = {"max_tokens": 64, "temperature": 0.8, "seed": 1000, "ignore_eos": True}
    sweep = await client.strength_sweep(
        "demo", found, prompts, strengths, score=demo.CodeScore.load(), perplexity=False, **sampling
    )
    for name, row in zip(names, sweep.rows, strict=True):
        print(f"{name}: {row.score:.3f} here, {FIGURES[name]['mean_score']:.3f} in direction.json")
        # Texts of 50 prompts, sampled: their mean has a standard error of some 0.04.
        assert row.score == pytest.approx(FIGURES[name]["mean_score"], abs=0.1)


async def test_strength_costs_likelihood_under_the_unsteered_model(client: Client) -> None:
    sweep = await client.strength_sweep(
        "demo",
        DIRECTION,
        ["def parse(text):", "This module provides"],
        [0.0, 80.0],
        score=Probe("along", "residual(5)", weight=DIRECTION),
        at="residual(4)",
        max_tokens=48,
        temperature=0.8,
    )
    plain, strong = sweep.rows
    print([(row.strength, row.score, row.perplexity) for row in sweep.rows])
    assert strong.score > plain.score + 40
    assert 1 < plain.perplexity < strong.perplexity


async def test_a_name_steers_as_the_array_does(client: Client) -> None:
    entry = await client.library.put("code", DIRECTION, model="demo", at="residual(4)")
    texts = []
    for vector in (DIRECTION, "code", entry.id):
        interventions = [Steer("residual(4)", vector, scale=Live("alpha")), Probe("p", "residual(4)", weight=vector)]
        options: Any = {"live": {"alpha": 20.0}, "max_tokens": 16, "temperature": 0.0}
        result = await client.trace("demo", "This module", interventions=interventions, **options).result()
        texts.append((result.text, result.saves["p"]))
    assert texts[0] == texts[1] == texts[2]
    assert result.accepted.library == {"interventions[0].vector": entry.id, "interventions[1].weight": entry.id}
    await client.library.remove("code")


async def test_a_probe_says_afterwards_what_it_would_have_said_live(client: Client, tmp_path: Path) -> None:
    probe = Probe("along", "residual(4)", weight=DIRECTION, bias=1.0)
    whole = Probe("stream", "residual(4)")
    options: Any = {"max_tokens": 12, "temperature": 0.0}
    live = await client.trace("demo", "def parse(text):", interventions=[probe, whole], **options).result()
    (saved,) = await client.apply_probe(probe, traces=[live.trace_id], saves="stream")
    (again,) = await client.apply_probe(probe, traces=[live.trace_id])
    await client.harvest("demo", ["def parse(text):"], [Probe("hs", "residual(*)", positions="all")], to=tmp_path / "h")
    (harvested,) = await client.apply_probe(probe, harvest=tmp_path / "h")
    said = np.asarray(live.saves["along"], np.float32)
    assert saved.values == pytest.approx(said, rel=0.02, abs=0.2)
    # At the positions of the prompt's last token and of all sampled ones but the last.
    first = saved.prompt_tokens - 1
    assert saved.positions.tolist() == list(range(first, first + 12))
    assert again.values[first : first + 12] == pytest.approx(said, rel=0.05, abs=1.0)
    assert harvested.values[first] == pytest.approx(said[0], rel=0.02, abs=0.2)
