"""The command: thin over the client, and open to subcommands of installed packages."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from importlib.util import find_spec

import anyio
import pytest

import tracewire
from tests.support.cli import command
from tracewire.cli import main as cli
from tracewire.cli.commands import UsageError
from tracewire.cli.installed import COMMANDS


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["models", "--url", "unix:///nowhere/redis.sock"], 1, "tracewire: cannot connect"),
        (["watch", "nowhere"], 1, "tracewire: no trace 'nowhere'"),
        (["watch", "nowhere", "--since", "later"], 2, "tracewire: since: expected 'start', 'now', 'recent'"),
        (["watch", "--names", "scores"], 2, "tracewire: --names shows saved names of one trace"),
    ],
)
async def test_errors_are_one_line(
    redis_url: str,
    prefix: str,
    arguments: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--url" not in arguments:
        arguments = [*arguments, "--url", redis_url, "--prefix", prefix]
    assert await command(*arguments) == status
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_no_url_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    assert cli.main(["models"]) == 1
    error = capsys.readouterr().err
    assert "TRACEWIRE_URL" in error
    assert "`tracewire up demo`" in error


def test_subcommands_of_other_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("extra", f"{__name__}:extra", COMMANDS), EntryPoint("models", "nowhere:main", COMMANDS)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries if group == COMMANDS else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: extra)
    assert cli.main(["extra", "a", "--b"]) == 7
    assert capsys.readouterr().out == "['a', '--b']\n"
    # No package replaces one of ours.
    assert cli.main(["models", "--url", "unix:///nowhere/redis.sock"]) == 1
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    assert re.search(r"^    extra +a command of an installed package", capsys.readouterr().out, re.MULTILINE)


def extra(arguments: list[str]) -> int:
    """A subcommand that another package brings."""
    print(arguments)
    return 7


def test_an_engine_that_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Its package comes with every client; what it needs does not.
    monkeypatch.setattr("tracewire.cli.installed.find_spec", lambda name: None if name == "zmq" else find_spec(name))
    assert cli.main(["engine", "demo"]) == 2
    error = capsys.readouterr().err
    assert "(missing: zmq)" in error
    assert "pip install 'tracewire[engine-gpu]'" in error
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as left:
        cli.main(["nothing"])
    assert left.value.code == 2


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "-V"):
        assert cli.main([option]) == 0
        assert capsys.readouterr().out == f"tracewire {version('tracewire')}\n"


def test_the_version_imports_no_more_than_the_client() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tracewire.cli", "--version"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    roots = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "tracewire" in roots
    assert not roots & {"rich", "argcomplete", "numpy", "redis", "fastapi", "torch", "vllm", "tracewire_engine"}


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "Start here: tracewire up demo" in shown.replace("\n", " ")
    assert re.search(r"^    engine  +serve a model", shown, re.MULTILINE)


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nothing"], ["models", "--nothing"], ["models", "nothing"]):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 2
        assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (UsageError("x"), 2), (tracewire.TracewireError("x"), 1)],
)
def test_an_error_in_a_task_group_is_that_error(error: BaseException, status: int) -> None:
    async def run(options: argparse.Namespace) -> int:
        async with anyio.create_task_group():
            raise error

    assert cli._run(argparse.Namespace(run=run)) == status


def test_a_defect_is_not_hidden() -> None:
    async def run(options: argparse.Namespace) -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        cli._run(argparse.Namespace(run=run))
