"""`tests.gpu_ranks`, which runs on several GPUs: what it makes of its figures, and all of it on a CPU."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import gpu_ranks
from tests.support import ROOT

FIGURES: dict[str, Any] = {
    "taps": {"read": {"probe at 0": gpu_ranks.STEPS}, "apart": {"probe at 0": 0.001}, "steer_matters": True}
    | {"tokens": True, "steered": True},
    "whole": {"apart": 0.001, "steps": 3 * gpu_ranks.STEPS},
    "ranks": {"failed": ["RanksDiffer"] * 3}
    | {how: {"tokens": 0, "apart": 0.0} for how in ("repeats", "beside", "agreed", "alone")},
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("taps read probe at 0", gpu_ranks.STEPS - 1),
        ("taps apart probe at 0", 0.2),
        ("taps steer_matters", False),
        ("taps tokens", False),
        ("taps steered", False),
        ("whole apart", 0.2),
        ("whole steps", gpu_ranks.STEPS),
        ("ranks failed", ["RanksDiffer"]),
        ("ranks beside tokens", 1),
        ("ranks agreed apart", 0.2),
    ],
)
def test_figures_that_are_wrong_are_not_good(place: str, value: Any) -> None:
    figures = copy.deepcopy(FIGURES)
    assert gpu_ranks.good(figures)
    first, _, rest = place.partition(" ")
    names = rest.split(" ", 1)
    holds = figures[first] if len(names) == 1 else figures[first][names[0]]
    holds[names[-1]] = value
    assert not gpu_ranks.good(figures)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor_parallel_size=2", "pipeline_parallel_size=2"])
def test_two_processes_on_a_cpu_come_to_what_two_gpus_should(starts_engine: None, layout: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_ranks", "--eager", "--layout", layout],
        cwd=ROOT,
        env={**environment, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["taps"]["steered"]
