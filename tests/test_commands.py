"""Commands of the pages that no other test runs, in small, and what they come to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engine_process import EngineProcess

ROOT = Path(__file__).parents[1]


def last_line(*command: str) -> Any:
    """What `python COMMAND`, which ends well, prints last."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_soak() -> None:
    sizes = ("--traces", "30", "--at-once", "10", "--consumers", "2", "--tokens", "4", "--rate", "50")
    said = last_line("-m", "tests.faults.harness.soak", *sizes, "--retention", "1", "--every", "0.2")
    assert (said["traces"], said["tokens"], said["lost"], said["wrong"]) == (30, 120, 0, [])
    assert said["left_on_the_queue"] == 0
    assert said["samples"] > 0
    assert all(value["rss_mib"] is None or min(value["rss_mib"]) > 0 for value in said["memory"].values())


@pytest.mark.full
def test_the_direction_is_found_again(engine: EngineProcess, engine_bus: str, tmp_path: Path) -> None:
    """By an eighth of the documents and a few prompts: about where the one that ships points."""
    example = ROOT / "examples" / "demo_model"
    sizes = ("--documents", "8", "--every", "5", "--out", str(tmp_path))
    command = [sys.executable, str(example / "direction.py"), "--url", engine_bus, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 3
    found, shipped = np.load(tmp_path / "direction.npy"), np.load(example / "direction.npy")
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-3)
    assert found @ shipped > 0.7
    figures = json.loads((tmp_path / "direction.json").read_text())
    assert (figures["documents"], figures["prompts"]) == (8, 10)
    assert figures["distance"] > 0
    scores = [figures[name]["mean_score"] for name in ("towards_prose", "unsteered", "towards_code")]
    assert 0 < scores[0] < scores[2] <= 1


@pytest.mark.full
def test_a_model_is_trained(tmp_path: Path) -> None:
    """In two short steps, on all of the library: what a run prints and writes, and what its files hold."""
    sizes = ("--steps", "2", "--batch", "50", "--length", "16", "--samples", "1", "--report", "1", "--device", "cpu")
    command = [sys.executable, str(ROOT / "examples" / "demo_model" / "train.py"), "--out", str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    corpus, tokens, first, last, loss, score = done.stdout.splitlines()
    written = json.loads((tmp_path / "corpus.json").read_text())
    assert corpus.startswith(f"corpus: {len(written['files'])} files of CPython {written['python']}, ")
    figures = json.loads((tmp_path / "metrics.json").read_text())
    assert f"{figures['parameters']:,} parameters" in tokens
    assert [line.split()[:2] for line in (first, last)] == [["step", "1/2"], ["step", "2/2"]]
    assert "held-out code" in last
    assert loss == f"loss: {figures['loss']}"
    assert score == f"score: {figures['score']}"
    assert figures["training"]["steps"] == 2
    # A model that knows nothing yet writes any of its 4096 tokens.
    assert all(7 < one < 9 for kind in ("train", "held_out") for one in figures["loss"][kind].values())
    assert figures["score"]["held_out_accuracy_documents"] > 0.9
    prompts = [json.loads(line) for line in (tmp_path / "prompts.txt").read_text().splitlines()]
    assert len(prompts) == 50
    assert {one["prompt"] for one in figures["samples"]} <= set(prompts)
    # The model that ships was written so.
    shipped = ROOT / "examples" / "demo_model"
    for folder in (Path(), Path("model")):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert names <= {path.name for path in (shipped / folder).iterdir()}
    config, ships = (json.loads((path / "model" / "config.json").read_text()) for path in (tmp_path, shipped))
    assert config | {"transformers_version": ""} == ships | {"transformers_version": ""}
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) == figures["bytes"]
