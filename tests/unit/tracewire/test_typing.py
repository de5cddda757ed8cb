"""What the README shows passes a type checker."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.support import ROOT
from tests.support.typecheck import mypy

AROUND = """
# mypy: allow-untyped-defs, ignore-missing-imports
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
    assert mypy([tmp_path / "readme.py"], tmp_path) == ""
