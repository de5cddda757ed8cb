"""Harvests of the real engine: rows are the layers' values at the positions that the index says."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.documented import commands
from tracewire import Client, LogitLens, Model, Probe
from tracewire.cli import main as cli

PROMPTS = [f"def function_{index}(first, second):" for index in range(12)]


async def test_a_harvest_of_all_layers_has_what_each_trace_reads(client: Client, model: Model, tmp_path: Path) -> None:
    probe = Probe("hs", "residual(*)", positions="all")
    done = await client.harvest(
        model, PROMPTS, [probe], to=tmp_path / "acts", max_tokens=3, temperature=0, shard_prompts=5
    )
    assert (done.prompts, done.failed, done.shards, done.total) == (12, 0, 3, 12)
    harvested = tracewire.harvest.open(tmp_path / "acts", exact=True)
    layers = model.info.layer_count
    assert sorted(harvested.tensors) == sorted(f"hs.{layer}" for layer in range(layers))
    assert sorted(harvested.keys()) == list(range(12))
    for key in (0, 7):
        result = await client.trace(model, PROMPTS[key], interventions=[probe], max_tokens=3, temperature=0).result()
        items = [np.asarray(item) for item in await result.load("hs", exact=True)]
        whole = np.concatenate(items)  # [positions, layers, hidden]
        prompt = harvested[key]
        assert result.accepted is not None
        assert prompt.token_ids == [*result.accepted.prompt_token_ids[0], *result.token_ids]
        assert prompt.prompt_tokens == len(result.accepted.prompt_token_ids[0])
        assert prompt.text == result.text
        for layer in range(layers):
            assert prompt[f"hs.{layer}"].dtype == whole.dtype
            # The batches differ, and so does the rounding.
            mine, other = prompt[f"hs.{layer}"].astype("float32"), whole[:, layer].astype("float32")
            np.testing.assert_allclose(mine, other, rtol=0.05, atol=0.05)
            assert prompt.positions[f"hs.{layer}"].tolist() == list(range(len(prompt.token_ids) - 1))


async def test_rows_of_the_index_are_those_of_the_tensors(client: Client, model: Model, tmp_path: Path) -> None:
    interventions = [
        Probe("last", "residual(1)"),
        Probe("generated", "residual(2:4)", positions="generated"),
        Probe("mlp", "model.layers.*.mlp", positions="prompt"),
        Probe("mean", "residual(0)", reduce="mean", positions="prompt"),
        LogitLens("lens", "residual(-1)", top_k=3, positions="all"),
    ]
    await client.harvest(model, PROMPTS[:3], interventions, to=tmp_path / "acts", max_tokens=4, temperature=0)
    harvested = tracewire.harvest.open(tmp_path / "acts")
    ((table, tensors),) = harvested.shards()
    rows = table.to_pylist()
    assert len(rows) == sum(len(array) for name, array in tensors.items() if not name.endswith(".logits"))
    for prompt in harvested:
        own = [row for row in rows if row["prompt"] == prompt.key]
        length, start = len(prompt.token_ids), prompt.prompt_tokens
        positions = {name: [row["position"] for row in own if row["tensor"] == name] for name in table_names(table)}
        assert positions["last"] == list(range(start - 1, start + 3))
        assert positions["generated.2"] == positions["generated.3"] == list(range(start, length - 1))
        assert positions["mlp.0"] == list(range(start))
        assert positions["mean"] == [None]
        assert positions["lens"] == list(range(length - 1))
        for row in own:
            if row["position"] is not None:
                assert row["token_id"] == prompt.token_ids[row["position"]]
                assert isinstance(row["token"], str)
        assert {row["layer"] for row in own if row["name"] == "lens"} == {model.info.layer_count - 1}
        first = next(row for row in own if row["tensor"] == "generated.3")
        np.testing.assert_array_equal(tensors["generated.3"][first["row"]], prompt["generated.3"][0])
        assert prompt["lens.token_ids"].shape == (length - 1, 3)
        # What the lens finds likeliest after the last layer is what is sampled next.
        assert prompt["lens.token_ids"][start - 1, 0] == prompt.token_ids[start]


def table_names(table: object) -> list[str]:
    return list(dict.fromkeys(table.column("tensor").to_pylist()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", ["safetensors", "parquet"])
async def test_filters_leave_out_rows_and_features(client: Client, model: Model, tmp_path: Path, form: str) -> None:
    probe = Probe("hs", "residual(2)", positions="prompt")
    options = {"format": form, "dtype": "float32"}
    await client.harvest(model, PROMPTS[:2], [probe], to=tmp_path / "whole", **options)
    whole = tracewire.harvest.open(tmp_path / "whole")
    await client.harvest(
        model, PROMPTS[:2], [probe], to=tmp_path / "some", positions=slice(1, None), every=2, keep_top=4, **options
    )
    some = tracewire.harvest.open(tmp_path / "some")
    for prompt in some:
        rows = whole[prompt.key]["hs"]
        kept = list(range(2, len(rows), 2))
        assert prompt.positions["hs.values"].tolist() == kept
        for row, values, indices in zip(rows[kept], prompt["hs.values"], prompt["hs.indices"], strict=True):
            np.testing.assert_allclose(values, np.sort(row)[::-1][:4], atol=0.05)
            np.testing.assert_allclose(values, row[indices], atol=0.05)


async def test_a_prompt_that_does_not_fit_is_listed_as_failed(client: Client, model: Model, tmp_path: Path) -> None:
    prompts = ["a", [1] * (model.info.max_model_len + 1), "b"]
    done = await client.harvest(model, prompts, [Probe("hs", "residual(0)")], to=tmp_path / "acts")
    assert (done.prompts, done.failed) == (2, 1)
    harvested = tracewire.harvest.open(tmp_path / "acts")
    assert sorted(harvested.keys()) == [0, 2]
    assert list(harvested.failed) == [1]
    assert "TraceRejected" in harvested.failed[1]


async def test_the_commands_and_programs_of_the_page_run(
    client: Client, engine_bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/harvest.md, from its top to its end, in one folder."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"p{index}", "text": text} for index, text in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (ROOT / "docs" / "harvest.md").read_text()
    programs: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, programs)
    await programs["harvest"](engine_bus)
    assert capsys.readouterr().out.startswith("12 prompts, ")
    whole = tracewire.harvest.open("acts")
    rows_of_layer = np.concatenate([prompt["hs.3"] for prompt in whole])
    np.testing.assert_allclose(programs["mean_of_a_layer"](), rows_of_layer.mean(axis=0), rtol=1e-3, atol=1e-3)
    token = next(row["token"] for index, _ in whole.shards() for row in index.to_pylist())
    assert len(programs["rows_of_a_token"](token)) >= 1
    lines = [line for line in commands(page) if line.startswith("tracewire harvest")]
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line.replace("redis://localhost", engine_bus))[1:]
        assert await anyio.to_thread.run_sync(partial(cli.main, words)) == 0, line
    keyed, top = tracewire.harvest.open("by-id"), tracewire.harvest.open("top")
    assert sorted(keyed.keys()) == sorted(row["id"] for row in rows)
    assert top[0]["hs.2.values"].shape[1] == top[0]["hs.3.indices"].shape[1] == 8
    assert tracewire.harvest.open("lens")[0]["lens.0.token_ids"].shape == (1, 5)
