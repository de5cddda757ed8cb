"""`tracewire harvest` runs a data set, tells how far it is, and says by its status what came of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import datasets
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.harvests import reads
from tracewire import HarvestProgress
from tracewire.cli import main as cli
from tracewire.cli.harvest import progress_line

PROMPTS = ["prompt one", "prompt two"]


@pytest.fixture
def command(redis_url: str, prefix: str, tmp_path: Path) -> Callable[..., Any]:
    """Runs `tracewire harvest tiny` with a file of prompts, with an event loop of its own."""
    data = tmp_path / "prompts.jsonl"

    async def run(*arguments: str, prompts: list[str] = PROMPTS, source: Path = data) -> int:
        data.write_text("".join(json.dumps({"id": f"p{row}", "text": text}) + "\n" for row, text in enumerate(prompts)))
        words = ["harvest", "tiny", str(source), "--to", str(tmp_path / "acts"), "--url", redis_url, "--prefix", prefix]
        return await anyio.to_thread.run_sync(partial(cli.main, [*words, *arguments]))

    return run


async def test_a_file_is_harvested(
    command: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", "--key", "id") == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / 'acts'}: 2 prompts, 0 failed\n"
    assert shown.err.startswith("2 prompts, 0 failed, 1 shards, ")
    assert sorted(tracewire.harvest.open(tmp_path / "acts").keys()) == ["p0", "p1"]


async def test_prompts_that_fail_are_named(
    command: Callable[..., Any], engine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", prompts=["good", "bad"]) == 3
    assert "tracewire: prompt 1 failed: InterventionError" in capsys.readouterr().err


async def test_data_sets_of_hugging_face(
    command: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": text} for text in PROMPTS])}).save_to_disk(
        saved
    )
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", "--split", "train", source=saved) == 0
        assert len(tracewire.harvest.open(tmp_path / "acts")) == 2


async def test_a_folder_of_files_is_a_data_set(
    command: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", "--split", "train", source=folder) == 0
        assert len(tracewire.harvest.open(tmp_path / "acts")) == 2


async def test_what_is_read_and_kept(command: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path) -> None:
    weight = tmp_path / "direction.npy"
    np.save(weight, np.ones(8, np.float32))
    options = ("--read", "residual(1)", "--lens", "l=residual(*)", "--lens-top-k", "3", "--project", str(weight))
    async with engine(reads) as serving:
        # The scripted engine saves something else than it was asked for.
        await command(*options, "--at", "prompt", "--positions", "0,-1", "--every", "2", "--max-tokens", "4")
    submission = serving.taken[0]
    probe, lens = submission.interventions
    assert (probe.name, probe.at, probe.positions) == ("read", "residual(1)", "prompt")
    assert probe.weight is not None
    assert (lens.name, lens.at, lens.top_k, lens.positions) == ("l", "residual(*)", 3, "prompt")
    assert submission.invokes[0].sampling["max_tokens"] == 4
    head = json.loads((tmp_path / "acts" / "harvest.json").read_text())
    assert (head["positions"], head["every"]) == ([0, -1], 2)


async def test_a_block_of_a_file(command: Callable[..., Any], engine: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "blocks.py"
    file.write_text(
        "import tracewire\n\n@tracewire.intervention\ndef watch(model, tracer, live):\n    hs = [].save()\n"
    )
    async with engine(reads) as serving:
        assert await command("--block", f"{file}:watch") == 0
        assert serving.taken[0].block.name == "watch"
        for wrong in (f"{file}::other", str(tmp_path), f"{tmp_path / 'none.py'}:watch"):
            assert await command("--block", wrong) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing is read: give --read AT, --lens AT or --block FILE.py::NAME"),
        (("--read", "residual(0)", "--project", "none.npy"), "No such file"),
        (("--read", "residual(0)", "--every", "0"), "every: expected a positive integer"),
    ],
)
async def test_options_that_cannot_be(
    command: Callable[..., Any],
    engine: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    async with engine(reads):
        assert await command(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--positions", "a:b"), ("--positions", "x"), ("--storage-options", "[]")])
def test_options_that_do_not_parse(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["harvest", "tiny", "a.jsonl", "--to", "acts", *option])
    assert option[0] in capsys.readouterr().err


async def test_the_summary_as_json(
    command: Callable[..., Any], engine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"to", "prompts", "failed"}
    assert found["prompts"] > 0
    assert found["failed"] == {}


async def test_an_error_ends_it_with_1(
    command: Callable[..., Any], engine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(reads):
        assert await command("--read", "hs=residual(*)", "--column", "question") == 1
    assert "row 0 of the data set: it has no column 'question'" in capsys.readouterr().err


#: Harvests to a file system of its own that is full or read-only at first; prints both commands' statuses.
MOUNTED = """
mount -t tmpfs -o size=300k tmpfs "$1" && { [ -z "$2" ] || mount -o "remount,$2" "$1"; }
shift 2
"$@"; echo "status $?"
mount -o remount,rw,size=50m "$MOUNTED"
"$@"; echo "status $?"
"$PYTHON" -c "import tracewire; print(sorted(tracewire.harvest.open('$MOUNTED').keys()) == list(range(60)))"
"""


@pytest.mark.parametrize(("mount", "error"), [("", "has no room for shards/"), ("ro", "refuses harvest.json: OSError")])
async def test_a_place_that_is_full_or_read_only_and_then_is_not(
    engine: Callable[..., Any], redis_url: str, prefix: str, tmp_path: Path, mount: str, error: str
) -> None:
    data, to = tmp_path / "prompts.jsonl", tmp_path / "acts"
    data.write_text("".join(json.dumps({"text": f"{row} {'prompt' * 20}"}) + "\n" for row in range(60)))
    to.mkdir()
    harvest = [sys.executable, "-m", "tracewire.cli", "harvest", "tiny", str(data), "--to", str(to)]
    harvest += ["--url", redis_url, "--prefix", prefix, "--read", "hs=residual(*)", "--shard-prompts", "10"]
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNTED, "sh", str(to), mount, *harvest]
    environment = {**os.environ, "MOUNTED": str(to), "PYTHON": sys.executable}
    async with engine(reads):
        done = await anyio.run_process(command, env=environment, cwd=ROOT, check=False)
    assert done.stdout.decode().replace(f"{to}: 60 prompts, 0 failed\n", "") == "status 1\nstatus 0\nTrue\n"
    assert f"tracewire: {to} {error}" in done.stderr.decode()


def test_the_line_of_progress() -> None:
    progress = HarvestProgress(3, 1, 6, 100, 2, 1000, 5_000_000, 2.0)
    assert progress_line(progress) == "9 of 100 prompts, 1 failed, 2 shards, 500 tokens/s, 2.5 MB/s"
