"""The README's code runs as it stands."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tracewire import Client, Model


def python_blocks() -> list[str]:
    """The README's code."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


async def test_the_trace_in_the_readme_runs(client: Client, model: Model, engine_bus: str, tmp_path: Path) -> None:
    first, second = python_blocks()[:2]
    block, _, body = first.partition("async with tracewire.connect")
    body = "async with tracewire.connect" + body
    body += "        assert len(result.saves['projection']) == 64\n        trace_id = trace.id\n"
    follow = second.replace("    ...", "    seen += 1")
    source = block + textwrap.dedent("""
        async def main(direction):
            seen = 0
        """)
    source += textwrap.indent(body + textwrap.indent(follow, "    "), "    ") + "    return seen\n"
    path = tmp_path / "readme_block.py"
    path.write_text(source.replace("redis://localhost", engine_bus))
    spec = importlib.util.spec_from_file_location("readme_block", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    direction = np.load(ROOT / "examples" / "demo_model" / "direction.npy")
    assert await module.main(direction) > 2


async def test_the_declared_interventions_in_the_readme_run(client: Client, model: Model) -> None:
    (third,) = [code for code in python_blocks() if "LogitLens(" in code]
    body = third.replace("    ...", "    return await trace.result()")
    scope: dict[str, Any] = {}
    exec("async def main(client, model, direction):\n" + textwrap.indent(body, "    "), scope)
    result = await scope["main"](client, model, np.load(ROOT / "examples" / "demo_model" / "direction.npy"))
    assert len(result.saves["projection"]) == len(result.saves["lens"]) == len(result.token_ids)
    assert result.saves["lens"][0]["token_ids"].shape == (model.info.layer_count, 3)


async def test_the_steering_in_the_readme_runs(
    client: Client, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    (fourth,) = [code for code in python_blocks() if "trace.steer(" in code]
    scope: dict[str, Any] = {"tracewire": tracewire, "Steer": tracewire.Steer, "Live": tracewire.Live}
    # So many tokens that there is time to steer on any machine.
    assert fourth.count("max_tokens=64") == 1
    fourth = fourth.replace("max_tokens=64", "max_tokens=400")
    source = "async def main(client, model, direction):\n" + textwrap.indent(fourth, "    ") + "    return trace"
    exec(source, scope)
    trace = await scope["main"](client, model, np.load(ROOT / "examples" / "demo_model" / "direction.npy"))
    assert (await trace.result()).live_version == 1
    assert re.search(r"^from token \d+ on: \{'alpha': 8\.0\} by ", capsys.readouterr().out, re.MULTILINE)
