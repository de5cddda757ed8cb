"""The pages' code on a real engine: what the pages say comes of it comes of it."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import openai
import pytest

import tracewire
from tests.support import ROOT, gateways
from tests.support.cells import blocks, run_cell, run_page
from tracewire import Client, Model

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
    assert first > 20
    projection = result.saves["projection"]
    # The change adds the length of the direction to each later projection.
    length = float(np.linalg.norm(scope["direction"]))
    assert np.mean(projection[first:]) - np.mean(projection[:first]) > length / 2
    assert len(result.token_ids) == 500


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


async def test_the_rest_of_the_readme(
    client: Client,
    model: Model,
    engine_bus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `test_readme.py` leaves: reading, the blocking client, chats, arrays and a harvest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "def parse(text):"}) + "\n")
    first = client.trace(model, "def parse(text):", max_tokens=4)
    await first.result()
    scope: dict[str, Any] = {"tracewire": tracewire, "client": client, "model": model, "trace_id": first.id}
    done = []
    for number, cell in enumerate(blocks(ROOT / "README.md", "python")):
        marks = ("text_stream()", "tools=[add]", "to_torch", "harvest.open")
        if any(mark in cell for mark in marks):
            await run_cell(cell.replace("redis://localhost", engine_bus), f"<README {number}>", scope)
            done.append(number)
    assert len(done) == 5
    assert scope["message"].role == "assistant"
    assert scope["result"].to_torch("hs").shape == (64, 256)
    assert "[" in capsys.readouterr().out


async def test_the_code_of_nnsight_s_page(client: Client, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"tracewire": tracewire, "model": model}
    await run_page(DOCS / "nnsight.md", scope)
    said = capsys.readouterr().out
    assert "torch.Size" in said or "(" in said
    # A row for each step of each prompt.
    assert len(scope["result"].shared["rows"]) == 4 + 5


async def test_the_code_for_those_who_come_from_other_libraries(
    client: Client, engine_bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(7).standard_normal((64, 256)).astype(np.float32) / 16
    sae = tracewire.SparseAutoencoder(rows, rows, model="demo", at="residual(4)")
    sae.save("blocks.4.hook_resid_post")
    for _ in range(3):
        changed: int | None = None
        scope: dict[str, Any] = {}
        await run_page(DOCS / "researchers.md", scope, redis=engine_bus)
        await scope["client"].library.remove("codelike")
        await scope["client"].aclose()
        async for event in client.subscribe(scope["trace"].id):
            if isinstance(event, tracewire.Steered):
                changed = event.first_token()
        # On a busy machine the trace may end before the change takes effect.
        if changed is not None and changed + 8 <= len(scope["saved"].token_ids):
            break
    # Where the prompts differ, the first layer has the answer; at the end, the last one has.
    normalized = scope["sweep"].normalized
    assert normalized[0].argmax() == 10
    assert abs(normalized[-1, -1] - 1) < 0.1
    watched = scope["saved"].to_numpy("watched")
    assert changed is not None
    assert changed > 8
    assert watched[changed:].mean() > watched[:9].mean() + 10
    assert "residual(" in capsys.readouterr().out


async def test_the_code_of_the_page_of_errors(client: Client) -> None:
    (cell,) = blocks(DOCS / "errors.md", "python")
    scope: dict[str, Any] = {"tracewire": tracewire, "anyio": anyio, "client": client, "prompt": "def parse(text):"}
    await run_cell(cell, "<errors>", scope)
    # The trace samples, so it may end early.
    assert 0 < len(scope["result"].token_ids) <= 64
    scope["prompt"] = ""
    await run_cell(cell, "<errors>", scope)


@pytest.mark.usefixtures("engine")
async def test_the_code_of_the_gateway_s_page(engine_bus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The stock client is a blocking one there, so it has a thread of its own."""
    scope: dict[str, Any] = {"openai": openai, "direction": [0.0] * 256}
    async with gateways.serving(engine_bus, "tw") as served:
        run = partial(run_page, DOCS / "gateway.md", scope, gateway=served.url)
        await anyio.to_thread.run_sync(lambda: asyncio.run(run()))
    assert "projection" in capsys.readouterr().out
