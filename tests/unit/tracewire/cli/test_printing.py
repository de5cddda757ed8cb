"""How commands print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus_engine import tiny
from tests.support.cli import command
from tests.support.terminal import on_terminal, snapshot_of
from tracewire.cli.printing import no_engines, print_json, print_json_line, print_rows, remark


def test_columns_have_tabs_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(("a", "b"), [(1, "x"), (2, "")])
    print_rows(("a", "b"), [])
    assert capsys.readouterr().out == "1\tx\n2\n"


async def test_a_terminal_gets_a_table(engine: Callable[..., Any], redis_url: str, prefix: str) -> None:
    async with engine(tiny):
        with on_terminal("models", "--prefix", prefix, TRACEWIRE_URL=redis_url) as terminal:
            assert await terminal.wait_end() == 0
            shown, kept = snapshot_of("models", terminal.text())
    assert shown == kept


def test_json_is_a_document_or_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": ["ä"]})
    print_json_line({"a": "x\ny"})
    document, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert json.loads(document) == {"a": ["ä"]}
    assert json.loads(line) == {"a": "x\ny"}


def printing(code: str, encoding: str) -> bytes:
    """What such code prints where the output has this encoding."""
    program = f"from tracewire.cli.printing import *\nprint_any_character()\n{code}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": encoding, "TERM": "dumb"}
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment).stdout


def test_output_that_is_not_utf_8_lacks_some_characters_and_fails_for_none() -> None:
    assert printing("print('\xe9 \u2581')", "latin-1") == b"\xe9 ?\n"
    assert printing("print('\xe9 \u2581')", "utf-8") == "é ▁\n".encode()
    # JSON loses nothing.
    for line in ("print_json", "print_json_line"):
        assert json.loads(printing(f"{line}(['\xe9 \u2581'])", "ascii")) == ["é ▁"]


def test_a_table_leaves_out_the_last_columns_if_they_are_empty() -> None:
    rows = "print_rows(('one', 'two', 'three'), [(1, '', ''), (2, 'x', '')])"
    terminal = f"import sys\nsys.stdout.isatty = lambda: True\n{rows}"
    header, _, first, second = filter(str.strip, printing(terminal, "utf-8").decode().splitlines())
    assert [header.split(), first.split(), second.split()] == [["one", "two"], ["1"], ["2", "x"]]


def test_remarks_do_not_mix_with_data(capsys: pytest.CaptureFixture[str]) -> None:
    remark("a remark")
    no_engines("redis://user:secret@host", "tw", "llama")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "secret" not in shown.err
    assert "No engines of 'llama' on redis://user:***@host with the prefix 'tw'. " in shown.err
    assert shown.err.endswith("Start one: tracewire engine llama --url redis://user:***@host\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("models",), "No engines on {place}. Start one: tracewire engine demo --url {url} --prefix {prefix}\n"),
        (("engines",), "No engines on {place}. Start one: tracewire engine demo --url {url} --prefix {prefix}\n"),
        (
            ("engines", "--model", "a"),
            "No engines of 'a' on {place}. Start one: tracewire engine a --url {url} --prefix {prefix}\n",
        ),
        (("dead", "list"), "No dead letters on {place}.\n"),
        (("dead", "list", "--model", "a"), "No dead letters of 'a' on {place}.\n"),
        (
            ("edits", "list", "a"),
            "No edits of 'a' on {place}. Install one: tracewire edits install --help\n"
            "No engines of 'a' on {place}. Start one: tracewire engine a --url {url} --prefix {prefix}\n",
        ),
        (("traces",), "No traces on {place}. Run one: tracewire run --help\n"),
        (("traces", "--ended", "--model", "a"), "No ended traces of 'a' on {place}. Run one: tracewire run --help\n"),
        (("library", "list"), "No entries on {place}. Add one: tracewire library add --help\n"),
        (("top",), "No engines on {place}. Start one: tracewire engine demo --url {url} --prefix {prefix}\n"),
    ],
)
async def test_an_empty_bus_says_so_and_what_to_start(
    redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    options = ("--interval", "0.05") if words == ("top",) else ()
    assert await command(*words, *options, "--url", redis_url, "--prefix", prefix) == 0
    assert capsys.readouterr() == (
        "",
        says.format(url=redis_url, prefix=prefix, place=f"{redis_url} with the prefix {prefix!r}"),
    )


@pytest.mark.parametrize("words", [("engines", "--model"), ("edits", "list"), ("top", "--interval", "0.05", "--model")])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("tinny", "; served now: 'tiny'; did you mean 'tiny'?"),
        ("gpt", "; served now: 'tiny'. Start one: tracewire engine gpt --url {url} --prefix {prefix}"),
    ],
)
async def test_another_models_name_is_met_with_those_that_are_served(
    engine: Callable[..., Any],
    redis_url: str,
    prefix: str,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    model: str,
    says: str,
) -> None:
    async with engine(tiny):
        assert await command(*words, model, "--url", redis_url, "--prefix", prefix) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    where = f"{redis_url} with the prefix {prefix!r}"
    assert last == f"No engines of {model!r} on {where}{says.format(url=redis_url, prefix=prefix)}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("watch", "nowhere"), "no trace 'nowhere'"),
        (("run", "tiny", "x"), "no engine serves the model 'tiny'"),
        (("drain", "e1"), "no engine is called 'e1'"),
    ],
)
@pytest.mark.parametrize("by", ["option", "environment"])
async def test_an_error_on_an_empty_bus_says_where_the_command_has_looked(
    redis_url: str,
    prefix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
    by: str,
) -> None:
    monkeypatch.setenv("TRACEWIRE_URL", redis_url if by == "environment" else "redis://elsewhere")
    where = () if by == "environment" else ("--url", redis_url)
    assert await command(*words, *where, "--prefix", prefix) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"tracewire: {says}")
    assert error.endswith(f"; looked on {redis_url} with the prefix {prefix!r}\n")


@pytest.mark.parametrize("words", [("models",), ("engines",), ("dead", "list"), ("edits", "list", "a")])
async def test_an_empty_bus_is_an_empty_list_as_json(
    redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert await command(*words, "--json", "--url", redis_url, "--prefix", prefix) == 0
    assert capsys.readouterr() == ("[]\n", "")


async def test_a_terminal_without_rich_gets_plain_lines(
    engine: Callable[..., Any], redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """As without the extra `cli`: a module that cannot be found stands in its place."""
    hidden = "import importlib.util as u\nfound = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *more: None if name == 'rich' else found(name, *more)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = os.pathsep.join([str(tmp_path), *(one for one in sys.path if one)])
    async with engine(tiny):
        with on_terminal("models", "--prefix", prefix, TRACEWIRE_URL=redis_url, PYTHONPATH=path) as terminal:
            assert await terminal.wait_end() == 0
            assert terminal.text().split() == (
                [
                    "tiny",
                    "1",
                    "engine",
                    "0",
                    "of",
                    "16",
                    "traces",
                    "bfloat16",
                    "4",
                    "layers",
                    "of",
                    "8",
                    "128",
                    "tokens",
                ]
            )
            assert "model" not in terminal.text()
