"""The mark `engine` is derived from what a test uses, in all folders alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_process import EngineProcess, check_expected, looked_at_inside

ROOT = Path(__file__).parents[1]

#: Of each folder of tests some that start none.
STARTS_NONE = ["tests/e2e/parallel/test_ray_nodes.py"]
STARTS_NONE += [f"tests/unit/tracewire_engine/worker/test_{name}.py" for name in ("deferred_report", "host_copy")]
#: By a client of the shared engine, by what is found inside one, by a fixture of its own, and in the test itself.
STARTS_ONE = ["tracing/test_readme", "tracing/test_nnsight_reference", "steering/test_pause", "serving/test_demo"]
STARTS_ONE = [f"tests/e2e/{name}.py" for name in STARTS_ONE]


def test_what_starts_an_engine_is_marked_and_nothing_else() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not engine", *STARTS_NONE, *STARTS_ONE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    selected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    names = [(path, re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(), re.M)) for path in STARTS_NONE]
    assert selected == {f"{path}::{name}" for path, tests in names for name in tests}


def test_nobody_sets_the_mark_by_hand() -> None:
    by_hand = "pytest.mark." + "engine"
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if by_hand in path.read_text()] == ["conftest.py"]


def test_who_starts_an_engine_unmarked_hears_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.support.engine_process._expected", False)
    for start in (check_expected, looked_at_inside, lambda: EngineProcess("redis://localhost", tmp_path)):
        with pytest.raises(RuntimeError, match="asks for the fixture starts_engine"):
            start()
    assert not (tmp_path / "engine.log").exists()
