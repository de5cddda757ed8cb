"""What the README shows passes a type checker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support import ROOT

AROUND = """
from typing import Any

import numpy as np
import tracewire
from tracewire import Live, LogitLens, Probe, Steer, StopWhen


async def main{number}(
    client: tracewire.Client, model: tracewire.Model, trace_id: str, direction: "np.ndarray[Any, Any]"
) -> None:
"""


def test_the_readme_s_code_passes_mypy_strictly(tmp_path: Path) -> None:
    """But for the functions that are blocks, which have no annotations."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    source = "".join(AROUND.format(number=n) + textwrap.indent(one, "    ") for n, one in enumerate(blocks))
    (tmp_path / "readme.py").write_text(source)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--allow-untyped-defs", "--config-file", os.devnull),
            *("--follow-imports=silent", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache")),
            str(tmp_path / "readme.py"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": os.pathsep.join(str(ROOT / folder) for folder in ("bus", "sdk"))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
