"""The README's code runs as it stands."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tracewire import Client, Model


def python_blocks() -> list[str]:
    """The README's code."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


async def test_the_trace_in_the_readme_runs(client: Client, model: Model, engine_bus: str, tmp_path: Path) -> None:
    """The first block is a program, as it stands; the second follows its trace from another process."""
    first, second = python_blocks()[:2]
    path = tmp_path / "first.py"
    path.write_text(first)
    environment = {**os.environ, "TRACEWIRE_URL": engine_bus, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = await anyio.run_process([sys.executable, str(path)], cwd=ROOT, env=environment)
    trace_id, *lines = done.stdout.decode().splitlines()
    assert lines[0].count("{'projection': [") == 1
    scope: dict[str, Any] = {}
    body = "async def main(client, trace_id):\n    seen = []\n" + textwrap.indent(second, "    ")
    exec(body.replace("    ...", "    seen.append(event)") + "    return seen\n", scope)
    seen = await scope["main"](client, trace_id)
    # The trace samples, so it may end early.
    sampled = seen[-1].usage.completion_tokens
    assert 0 < sampled == sum(len(event.delta["projection"]) for event in seen if event.type == "output")


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
