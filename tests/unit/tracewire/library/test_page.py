"""The code of docs/library.md, on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import ROOT
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tests.support.cells import run_page
from tracewire_bus.transport.embedded import EmbeddedServer


async def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept(library=stage.submission.library)
        await stage.output("one")
        await stage.final()

    monkeypatch.chdir(ROOT)
    info = engine_info("demo", hidden_size=256, layer_count=8)
    async with EmbeddedServer.start() as server, BusEngine.running(server.url, "tw", script, info):
        scope: dict[str, Any] = {"__name__": "__main__"}
        values = await run_page(ROOT / "docs" / "library.md", scope, redis=server.url)
        await scope["client"].aclose()
    assert capsys.readouterr().out.splitlines() == [
        "code@1",
        "{'interventions[0].vector': 'code@1', 'interventions[1].weight': 'code@1'}",
    ]
    assert values[1] == ["code@1"]
