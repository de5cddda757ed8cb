"""`tracewire sweep` on scripted engines: strengths with their scores, and patches as a table, a heat map and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from tests.support.cli import command
from tests.unit.tracewire.extract.test_sweep import Writes
from tests.unit.tracewire.test_patch_sweep import Scripted
from tracewire import Client

Engine = Callable[..., Any]


@pytest.fixture
def where(redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The options of a command in a folder with a vector, prompts and scores."""
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.linspace(-1, 1, 8, dtype=np.float32))
    Path("prompts.txt").write_text("x\ny\n")
    Path("scores.py").write_text("def length(text):\n    return len(text)\n\n\nnumber = 3\n")
    return "--url", redis_url, "--prefix", prefix


STRENGTHS = ("sweep", "strengths", "tiny", "--steer", "residual(1)@v.npy", "--strengths=3,1")


async def test_strengths_are_scored_by_a_function(
    client: Client, engine: Engine, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    score = ("--score", "scores.py::length")
    async with engine(Writes()):
        await client.models.get("tiny", timeout=30)
        assert await command(*STRENGTHS, "--prompts", "prompts.txt", *score, "--plot", "s.svg", "--texts", *where) == 0
        rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert await command(*STRENGTHS, "--prompt", "x", *score, "--json", "--no-perplexity", *where) == 0
        printed = json.loads(capsys.readouterr().out)
    assert [(row[0], row[1], row[3], row[4]) for row in rows] == [
        ("3", "3", "best", "aaa | aaa"),
        ("1", "1", "", "a | a"),
    ]
    assert float(rows[0][2]) == pytest.approx(np.exp(0.5), rel=1e-3)
    assert "perplexity" in await anyio.Path("s.svg").read_text()
    assert (printed["at"], printed["best"]) == ("residual(1)", 3)
    assert printed["rows"][1] == {"strength": 1, "score": 1, "scores": [1], "texts": ["a"], "perplexity": None}


async def test_strengths_are_scored_by_a_probe_within_a_perplexity(
    client: Client, engine: Engine, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    probe = ("--score", "p=residual(2)@v.npy", "--most-perplexity", "1.1")
    async with engine(Writes()):
        await client.models.get("tiny", timeout=30)
        assert await command(*STRENGTHS, "--prompt", "x", *probe, "--json", *where) == 0
        printed = json.loads(capsys.readouterr().out)
    assert [row["score"] for row in printed["rows"]] == [3, 1]
    # Each has the same perplexity, of 1.6.
    assert printed["best"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--score", "scores.py::length"), "expected --prompt TEXT, or --prompts FILE"),
        (("--prompt", "x", "--score", "scores.py::number"), "--score: scores.py has no function 'number'"),
        (("--prompt", "x", "--score", "gone.py::length"), "--score: expected a Python file, got 'gone.py'"),
        (("--prompt", "x", "--score", "residual(2)"), "--score: expected a probe of a number"),
        (("--prompt", "x", "--score", "residual(2)@gone.npy"), "--score: gone.npy"),
        (
            ("--prompt", "x", "--score", "p=residual(2)@v.npy", "--steer", "residual(1)@v.npy*3"),
            "the strengths are the factors",
        ),
        (("--prompts", "gone.txt", "--score", "p=residual(2)@v.npy"), "--prompts: gone.txt cannot be read"),
    ],
)
async def test_what_is_mistyped(
    where: tuple[str, ...], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert await command(*STRENGTHS, *arguments, *where) == 2
    assert message in capsys.readouterr().err


async def test_what_an_engine_would_refuse_names_its_option(
    client: Client, engine: Engine, where: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        ((*STRENGTHS, "--prompt", "x", "--score", "p=residual(99)@v.npy"), "--score: "),
        ((*STRENGTHS, "--prompt", "x", "--score", "p=residual(2)@v.npy", "--steer", "nowhere@v.npy"), "--steer: "),
        ((*STRENGTHS, "--prompt", "x", "--score", "p=residual(2)@v.npy", "--sampling", "colour=3"), "--sampling "),
        (("sweep", "patch", "tiny", "clean", "cccc", "--token", "5"), "corrupted: "),
        (("sweep", "patch", "tiny", "clean", "ccccc", "--token", "5", "--layers", "99"), "--layers: "),
        (("sweep", "patch", "tiny", "clean", "ccccc", "--token", "5", "--positions", "9"), "--positions: "),
        (("sweep", "patch", "tiny", "clean", "ccccc", "--token", "5", "--at", "residual(1)"), "--at: "),
        (("sweep", "patch", "tiny", "clean", "ccccc", "--token", "99999999"), "--token: "),
    ]
    async with engine(Scripted()):
        await client.models.get("tiny", timeout=30)
        for arguments, message in cases:
            status = await command(*arguments, *where)
            error = capsys.readouterr().err
            assert (status, message in error) in {(2, True), (1, True)}, (arguments, error)


PATCH = ("sweep", "patch", "tiny", "clean", "ccccc", "--token", "5", "--layers", "1:3", "--positions", "0,-1")


async def test_patches_are_a_table_json_and_a_heat_map(
    client: Client,
    engine: Engine,
    where: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with engine(Scripted()):
        await client.models.get("tiny", timeout=30)
        assert await command(*PATCH, "--raw", *where) == 0
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert await command(*PATCH, "--against", "6", "--json", *where) == 0
        printed = json.loads(capsys.readouterr().out)
        monkeypatch.setattr("tracewire.cli.printing.rich_terminal", lambda: True)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLORTERM", "truecolor")
        monkeypatch.setenv("COLUMNS", "60")
        assert await command(*PATCH, *where) == 0
        map_ = capsys.readouterr().out
        monkeypatch.setenv("COLUMNS", "14")
        assert await command(*PATCH, *where) == 0
        narrow = capsys.readouterr().out
    assert lines[0] == ["position", "1", "2"]
    # 100 a layer and 1 a position above the corrupted prompt's -10.
    assert lines[1:3] == [["0 c", "90", "190"], ["4 c", "94", "194"]]
    assert lines[3:] == [["clean", "-2"], ["corrupted", "-10"]]
    assert (printed["layers"], printed["positions"], printed["tokens"]) == ([1, 2], [0, 4], ["c", "c"])
    assert printed["values"] == [[91.0, 95.0], [191.0, 195.0]]
    assert (printed["clean"], printed["corrupted"]) == (-1.0, -9.0)
    assert printed["normalized"][0][0] == pytest.approx(100 / 8)
    # The greatest number is the reddest.
    assert map_.splitlines()[0].endswith("position      1     2\x1b[0m")
    assert "48;2;255;70;70m 25.50" in map_
    assert "48;2;255;164;164m 12.50" in map_
    # Where the numbers do not fit, colours do.
    assert "48;2;255;70;70m  \x1b" in narrow
    assert "25.50" not in narrow
