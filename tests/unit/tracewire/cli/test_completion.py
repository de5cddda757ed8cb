"""Shells complete commands and options."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.support import ROOT
from tests.support.cli import story
from tracewire.cli import main as cli
from tracewire.cli.commands import subparsers_of
from tracewire.cli.completion import SHELLS, _add_others


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_s_code_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "tracewire" in capsys.readouterr().out


def test_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'tracewire[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tracewire ca", {"cancel"}),
        ("tracewire run --st", {"--steer", "--stop"}),
        ("tracewire traces --en", {"--ended"}),
        ("tracewire edits in", {"install"}),
        ("tracewire completion f", {"fish"}),
    ],
)
def test_bash_completes(line: str, found: set[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path / "answer") == found


def completed(line: str, answer: Path, **more: str) -> set[str]:
    """The words for the end of a line. As bash asks: by environment variables, with the answer in a file."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        **more,
    }
    code = "import sys; from tracewire.cli.main import main; sys.argv = ['tracewire']; main()"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")
    return {word.strip() for word in answer.read_text().split("\n") if word.strip()}


async def test_bash_completes_the_names_of_served_models(
    engine: Callable[..., Any], redis_url: str, prefix: str, tmp_path: Path
) -> None:
    async with engine(story):
        where = f"--url {redis_url} --prefix {prefix}"
        line = partial(completed, answer=tmp_path / "answer", TRACEWIRE_URL="")
        for asked, found in (
            (f"tracewire run {where} t", {"tiny"}),
            (f"tracewire run {where} x", set()),
            (f"tracewire top {where} --model ", {"tiny"}),
        ):
            # A busy machine may take longer than a shell waits.
            with anyio.fail_after(60):
                while await anyio.to_thread.run_sync(line, asked) != found:
                    pass


@pytest.mark.parametrize("url", ["", "redis://127.0.0.1:1", "no://thing", "embedded://"])
def test_without_a_bus_no_name_is_completed(url: str, tmp_path: Path) -> None:
    assert completed("tracewire chat t", tmp_path / "answer", TRACEWIRE_URL=url) == set()


def test_commands_of_other_packages_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "tracewire.commands": [EntryPoint("extra", "nowhere:main", "tracewire.commands")],
        "tracewire.completion": [
            EntryPoint("engine", "tracewire_engine.launch.early:help_parser", "tracewire.completion")
        ],
    }
    monkeypatch.setattr(cli, "entry_points", lambda group: entries[group])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries[group])
    parser = cli.build_parser()
    _add_others(parser)
    found = subparsers_of(parser)
    assert "--capacity" in found["engine"]._option_string_actions
    assert "extra" in found


def test_the_engine_s_parser_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["tracewire.completion"]["engine"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
