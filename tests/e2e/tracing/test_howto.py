"""The tutorial's and the how-tos' code on a real engine: what the pages say comes of it comes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support import ROOT, gateways
from tests.support.cells import run_page
from tracewire import Client

DOCS = ROOT / "docs"


async def test_the_tutorial_finds_a_direction_and_steers_along_it(
    client: Client, engine_bus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scope: dict[str, Any] = {}
    async with gateways.serving(engine_bus, "tw") as served:
        await run_page(DOCS / "tutorial.md", scope, redis=engine_bus, gateway=served.url)
    said = capsys.readouterr().out
    assert "8 layers of 256" in said
    assert "(16, 256)" in said
    result = scope["result"]
    (change,) = [line for line in said.splitlines() if line.startswith("steered from token ")]
    first = int(change.split()[3])
    projection = result.saves["projection"]
    # The change adds the length of the direction to each later projection.
    length = float(np.linalg.norm(scope["direction"]))
    assert np.mean(projection[first:]) - np.mean(projection[:first]) > length / 2
    assert len(result.token_ids) == 200


async def test_the_notebook_s_cells(client: Client, engine_bus: str) -> None:
    values = await run_page(DOCS / "howto" / "notebook.md", {}, redis=engine_bus)
    table = values[2]
    assert len(table) == 8
    assert (table["norms"] > 0).all()


async def test_what_a_block_saves_in_place_of_a_print(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    await run_page(DOCS / "howto" / "print.md", {"tracewire": tracewire, "client": client})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" torch")[0] for line in lines] == [
        "step 0: (5, 256)",
        "step 1: (1, 256)",
        "step 2: (1, 256)",
    ]


async def test_bfloat16(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"tracewire": tracewire, "client": client}
    await run_page(DOCS / "howto" / "bfloat16.md", scope)
    assert capsys.readouterr().out.splitlines() == ["torch.bfloat16 (4, 256)", "float32 (4, 256)", "bfloat16"]
    assert np.array_equal(scope["kept"].astype(np.float32), scope["wide"])


async def test_a_typed_block(client: Client) -> None:
    scope: dict[str, Any] = {}
    await run_page(DOCS / "howto" / "typing.md", scope)
    assert len(await scope["run"](client, "def parse(text):")) == 4
