"""`tracewire export` writes a trace to a file."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.support.bus_engine import Stage
from tests.support.cli import command
from tracewire import Client
from tracewire.cli.export import tensors_of
from tracewire.traces.state import Choice, Saves
from tracewire_bus.wire.messages import Set
from tracewire_bus.wire.packing import wire

TEXTS = ("one", " two", " three")


async def saving(stage: Stage) -> None:
    """Three tokens with numbers, arrays and a lens for each, and a word and a large array once."""
    await stage.accept()
    large = await stage.store(np.arange(6, dtype=np.float32).reshape(2, 3), "large")
    await stage.output("", [Set(path=("large",), value=wire(large)), Set(path=("word",), value="code")])
    for number, text in enumerate(TEXTS):
        lens = {"token_ids": np.array([number, 9], np.int32), "logits": np.array([1.5, 0.5], np.float32)}
        values = {"p": number / 2, "hs": np.full(2, number, np.float32), "lens": lens}
        await stage.save(text, values)
    await stage.final()


@pytest.fixture
async def trace_id(client: Client, engine: Callable[..., Any]) -> str:
    """The id of a trace that has ended."""
    async with engine(saving), client.trace("tiny", "x") as trace:
        await trace.until_done()
    return trace.id


@pytest.fixture
def where(redis_url: str, prefix: str) -> tuple[str, ...]:
    """The options that name the bus."""
    return "--url", redis_url, "--prefix", prefix


async def test_json_lines_on_standard_output(
    trace_id: str, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command("export", trace_id, "--names", "p", *where) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["type"] for event in events] == ["accepted", *["output"] * 4, "final"]
    assert [event["delta"] for event in events[1:-1]] == [{}, {"p": [0.0]}, {"p": [0.5]}, {"p": [1.0]}]


async def test_json_lines_in_a_file(
    trace_id: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "trace.jsonl"
    assert await command("export", trace_id, "--to", str(to), *where) == 0
    assert capsys.readouterr().out == f"{to}: 4 tokens, saves large, word, p, hs, lens\n"
    events = [json.loads(line) for line in to.read_text().splitlines()]
    assert events[1]["delta"]["large"]["shape"] == [2, 3]
    assert events[2]["delta"]["hs"] == [[0.0, 0.0]]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


async def test_safetensors(
    trace_id: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "saves.safetensors"
    assert await command("export", trace_id, "--to", str(to), "--json", *where) == 0
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert (said["file"], said["format"], said["tokens"]) == (str(to), "safetensors", 4)
    assert shown.err == "tracewire: word holds no numbers, and is left out: JSON lines hold it\n"
    found = load_file(to)
    assert set(found) == {"p", "hs", "lens.token_ids", "lens.logits", "large", "token_ids"} == set(said["saves"])
    assert found["p"].tolist() == [0.0, 0.5, 1.0]
    assert found["hs"].shape == (3, 2)
    assert found["lens.token_ids"].tolist() == [[0, 9], [1, 9], [2, 9]]
    assert found["large"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with safe_open(to, "numpy") as file:
        about = file.metadata()
    assert (about["trace_id"], about["status"], about["text"]) == (trace_id, "finished", "".join(TEXTS))


async def test_parquet_has_a_row_for_each_token(
    client: Client,
    engine: Callable[..., Any],
    where: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for number, text in enumerate(TEXTS):
            await stage.save(text, {"p": number / 2, "hs": np.full(2, number, np.float32)}, token_strings=[text])
        await stage.final(deltas=[(0, 0, [Set(path=("last",), value=[1.0])])])

    async with engine(script), client.trace("tiny", "x", token_strings=True) as trace:
        await trace.until_done()
    to = tmp_path / "tokens.parquet"
    assert await command("export", trace.id, "--to", str(to), *where) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{to}: 3 tokens, saves hs, p\n"
    assert "last has no item for each token" in shown.err
    table = pyarrow.parquet.read_table(to)
    assert table.column_names == ["invoke", "choice", "index", "token_id", "token", "p", "hs"]
    assert table["token"].to_pylist() == list(TEXTS)
    assert table["p"].to_pylist() == [0.0, 0.5, 1.0]
    assert table["hs"].to_pylist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert table.schema.metadata[b"trace_id"] == trace.id.encode()


async def test_what_cannot_be_written(
    trace_id: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, status, says in (
        (("--to", "trace.csv"), 2, "expected a file that ends with .jsonl, .safetensors, .parquet"),
        (("--format", "parquet"), 2, "give --to FILE"),
        (("--json",), 2, "give --to FILE"),
        (("--to", str(tmp_path / "nowhere" / "a.jsonl")), 2, "No such file or directory"),
    ):
        assert await command("export", trace_id, *options, *where) == status
        assert says in capsys.readouterr().err
    assert await command("export", "nobody", "--to", str(tmp_path / "a.jsonl"), *where) == 1
    assert list(tmp_path.iterdir()) == []


async def test_a_trace_that_runs_is_written_as_far_as_it_is(
    client: Client,
    engine: Callable[..., Any],
    where: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def endless(stage: Stage) -> None:
        await stage.accept()
        await stage.save("a", {"p": 1.0})
        await stage.steered()

    async with engine(endless), client.trace("tiny", "x", live={"a": 1}) as trace:
        await anext(trace)
        assert await command("export", trace.id, "--to", str(tmp_path / "a.safetensors"), *where) == 0
    assert "still runs" in capsys.readouterr().err
    assert load_file(tmp_path / "a.safetensors")["p"].tolist() == [1.0]


def test_several_choices_and_lists_of_odd_shapes() -> None:
    odd: list[Any] = [np.zeros(1), np.zeros(2)]
    choices = [
        Choice(0, 0, saves=Saves({"a": odd, "n": [1, 2], "flag": True, "nested": {"b": 2.5}})),
        Choice(0, 1, saves=Saves({"mixed": [1, "x"]})),
    ]
    arrays, rest = tensors_of(choices, None)
    assert {name: array.shape for name, array in arrays.items()} == {
        "0.0.a.0": (1,),
        "0.0.a.1": (2,),
        "0.0.n": (2,),
        "0.0.nested.b": (),
    }
    assert arrays["0.0.n"].dtype == np.int64
    assert rest == {"0.0.flag": True, "0.1.mixed": [1, "x"]}
    assert tensors_of(choices, ["n"])[0].keys() == {"0.0.n"}


async def test_a_name_that_was_not_saved_is_refused(
    trace_id: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("trace.safetensors", "trace.parquet"):
        assert await command("export", trace_id, "--to", str(tmp_path / name), "--names", "p", "wrd", *where) == 2
        says = "tracewire: --names: the trace has no save 'wrd' (it has hs, large, lens, p, word); did you mean word?\n"
        assert capsys.readouterr().err == says
        assert not (tmp_path / name).exists()
