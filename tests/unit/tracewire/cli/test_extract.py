"""`tracewire extract` finds a direction on a scripted engine, and writes it to the library and to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus_engine import BusEngine, engine_info
from tests.support.cli import command
from tests.unit.tracewire.extract.test_extraction import NEGATIVE, POSITIVE, reads
from tests.unit.tracewire.extract.test_page import plays
from tracewire import Client
from tracewire.cli.main import build_parser
from tracewire.library import files


@pytest.fixture
def where(redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The options of a command in a folder with prompts."""
    monkeypatch.chdir(tmp_path)
    Path("yes.txt").write_text("\n".join(POSITIVE))
    Path("no.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in NEGATIVE))
    Path("bad.jsonl").write_text("{")
    Path("odd.jsonl").write_text("3")
    Path("starts.txt").write_text("This module\n")
    Path("scores.py").write_text("most = 3\n\ndef length(text):\n    return len(text)\n")
    return "--positive", "yes.txt", "--negative", "no.jsonl", "--folds", "2", "--url", redis_url, "--prefix", prefix


async def test_a_direction_is_found_and_kept(
    client: Client,
    where: tuple[str, ...],
    redis_url: str,
    prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with BusEngine.running(redis_url, prefix, reads, engine_info("tiny")):
        await client.models.get("tiny", timeout=30)
        kept = ("--name", "kind", "--licence", "MIT", "--to", "kind.gguf", "--plot", "kind.svg")
        assert await command("extract", "tiny", *kept, *where) == 0
        shown = capsys.readouterr()
        more = ("--kind", "probe", "--to", "kind.safetensors", "--token", "mean", "--positions", "1:3")
        assert await command("extract", "tiny", *more, "--json", *where) == 0
        printed: Any = json.loads(capsys.readouterr().out)
    rows = [line.split("\t") for line in shown.out.splitlines()]
    assert [row[0] for row in rows] == [f"residual({layer})" for layer in range(4)]
    assert [row[0] for row in rows if row[-1] == "chosen"] == ["residual(2)"]
    assert "kind@1: --steer 'residual(2)@kind@1*" in shown.err
    entry = await client.library.get("kind")
    assert (entry.at, entry.licence) == ("residual(2)", "MIT")
    assert list(files.read("kind.gguf").arrays) == [2]
    assert (tmp_path / "kind.svg").read_text().startswith("<svg")
    assert (printed["layer"], printed["file"], printed["entry"]) == (2, "kind.safetensors", None)
    assert printed["distance"] == pytest.approx(23, rel=0.05)
    assert files.read("kind.safetensors").options["kind"] == "probe"


async def test_strengths_are_swept(
    client: Client,
    where: tuple[str, ...],
    redis_url: str,
    prefix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Texts of the scripted engine are the same at each strength: " a(b)", which a function scores by its length."""
    sweep = (
        "--token",
        "mean",
        "--strengths=-20,0.5",
        "--prompts",
        "starts.txt",
        "--score",
        "scores.py::length",
        "--sweep-plot",
        "sweep.svg",
    )
    async with BusEngine.running(redis_url, prefix, plays, engine_info("tiny")):
        await client.models.get("tiny", timeout=30)
        assert await command("extract", "tiny", *sweep, *where) == 0
        rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert await command("extract", "tiny", "--json", *sweep, *where) == 0
        printed: Any = json.loads(capsys.readouterr().out)
    assert rows[-2:] == [["-20", "5.000", "2.72"], ["0.5", "5.000", "2.72"]]
    assert [(row["strength"], row["score"]) for row in printed["sweep"]] == [(-20.0, 5.0), (0.5, 5.0)]
    assert (tmp_path / "sweep.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "yes.txt"), "--prompts: expected --strengths with it"),
        (("--strengths=1",), "--strengths: expected --prompts with it"),
        (
            ("--strengths=1", "--prompts", "yes.txt", "--score", "nope.py::f"),
            "--score: expected a Python file, got 'nope.py'",
        ),
        (
            ("--strengths=1", "--prompts", "yes.txt", "--score", "scores.py::f"),
            "--score: scores.py has no function 'f'",
        ),
        (
            ("--strengths=1", "--prompts", "yes.txt", "--score", "scores.py::most"),
            "--score: scores.py has no function 'most'",
        ),
        (("--positive", "gone.txt"), "--positive: gone.txt cannot be read: No such file"),
        (("--positive", "bad.jsonl"), "--positive: line 1 of bad.jsonl is no JSON"),
        (("--positive", "odd.jsonl"), "--positive: line 1 of odd.jsonl: expected a text"),
        (("--to", "a.pt"), "--to: expected a file that ends with"),
    ],
)
async def test_what_is_mistyped(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status = await command("extract", "tiny", *where, *arguments)
    error = capsys.readouterr().err
    assert (status, message in error) == (2, True), error


def test_positions_are_a_span(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["extract", "tiny", "--positive", "a", "--negative", "b", "--positions"]
    assert build_parser().parse_args([*given, "8:"]).positions == slice(8, None)
    with pytest.raises(SystemExit):
        build_parser().parse_args([*given, "8"])
    assert "expected A:B, as 8:256, got '8'" in capsys.readouterr().err
