"""The code of docs/extract.md, on a scripted engine that reads activations, writes, and scores texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tests.support.cells import run_page
from tests.unit.tracewire.extract.test_extraction import activations
from tracewire import Probe
from tracewire_bus.transport.embedded import EmbeddedServer


async def plays(stage: Stage) -> None:
    """Reads activations for a harvest; reads a sequence again; or writes two tokens."""
    invoke, given = stage.submission.invokes[0], stage.submission.interventions
    prompt = invoke.prompt or ""
    ids = invoke.token_ids or [ord(character) for character in prompt]
    await stage.accept(prompt_token_ids=[ids], prompt_token_strings=[list(prompt)])
    fields: dict[str, Any] = {}
    if given and given[0].at == "residual(*)":
        await stage.save("!", {given[0].name: activations(prompt)}, token_strings=["!"])
    elif given and isinstance(given[0], Probe) and given[0].name == "stream":
        rows = activations(prompt)[:, int(given[0].at.strip("residual()"))]
        harvests = given[0].positions == "all"
        await stage.save("!", {"stream": rows if harvests else rows[-1]}, token_strings=["!"])
    elif invoke.token_ids is not None:
        values = {one.name: np.asarray(ids, np.float32) for one in given}
        await stage.save("!", values)
        fields["prompt_logprobs"] = [[{}, *({token: (-1.0, 1, "a")} for token in ids[1:])]]
    else:
        await stage.save(" a", {"is_code": 1.0})
        await stage.save("(b)", {"is_code": 2.0})
    await stage.final(**fields)


async def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    async with EmbeddedServer.start() as server, BusEngine.running(server.url, "tw", plays, engine_info("demo")):
        scope: dict[str, Any] = {"__name__": "__main__"}
        found, saved, rows, readings = await run_page(ROOT / "docs" / "extract.md", scope, redis=server.url)
        await scope["client"].aclose()
    assert found.model == "demo"
    bias = float(scope["found"].probe("is_code").bias)
    assert saved == [1.0, 2.0]
    assert [(strength, score) for strength, score, _ in rows] == [(-20, 1), (0, 1), (20, 1)]
    prompt = "This module"
    assert [key for key, _, _ in readings[:2]] == [0, 1]
    assert len(readings[0][1]) == len(scope["prompts"][0])
    # One row of the trace's one token; and its whole text, run once more.
    assert readings[2][1] == [len(prompt) - 1]
    expected = activations(prompt)[-1, scope["found"].layer] @ scope["found"].vector
    assert readings[2][2] == pytest.approx([float(expected) + bias], rel=1e-4)
    assert readings[3][1] == list(range(len(prompt) + 1))
