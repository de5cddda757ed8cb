"""The screenshots of the documentation are what their programs make now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import ROOT
from tests.support.browser import chromium
from tests.support.vscode.editor import MISSING

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("starts_engine")]

KEPT = sorted((ROOT / "docs" / "screenshots").glob("*.png"))
PROGRAMS = {
    "dashboard_screenshots": ("list", "side-by-side", "start", "trace"),
    "notebook_screenshots": ("notebook",),
    "vscode.screenshot": ("vscode",),
}


def coarse(path: Path) -> np.ndarray:
    """A picture without its details: texts and values differ from run to run."""
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB").resize((48, 36)), np.float32)


def test_each_screenshot_has_its_program() -> None:
    names = tuple(name for names in PROGRAMS.values() for name in names)
    assert {path.stem.rpartition("-")[0] for path in KEPT} == set(names)


@pytest.mark.parametrize(
    "program",
    [
        "dashboard_screenshots",
        "notebook_screenshots",
        pytest.param("vscode.screenshot", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    ],
)
def test_the_screenshots_are_as_they_are_made_now(program: str, tmp_path: Path) -> None:
    chromium()
    command = [sys.executable, "-m", f"tests.support.{program}", "--to", tmp_path]
    # The program starts an engine by itself, as this test says that it does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    subprocess.run(command, check=True, cwd=ROOT, timeout=900, env=environment)
    made = sorted(tmp_path.glob("*.png"))
    assert [path.name for path in made] == [path.name for path in KEPT if path.stem.startswith(PROGRAMS[program])]
    kept = {path.name: coarse(path) for path in KEPT}
    for path in made:
        now = coarse(path)
        differences = {name: float(np.abs(picture - now).mean()) for name, picture in kept.items()}
        # Of all screenshots it is the one of its name.
        assert min(differences, key=differences.__getitem__) == path.name, differences
        assert differences[path.name] < 12, differences
