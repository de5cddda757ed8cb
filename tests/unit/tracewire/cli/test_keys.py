"""Keys of a terminal."""

from __future__ import annotations

import os
import pty
import sys
import termios
from collections.abc import Iterator

import anyio
import pytest

from tracewire.cli.keys import one_key_at_a_time, parse_keys, read_keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[B\x1b[C\x1b[D", ["up", "down", "right", "left"]),
        ("\x1bOA\x1bOB\x1bOC\x1bOD", ["up", "down", "right", "left"]),
        ("\r\n\t\x7f", ["enter", "enter", "tab", "backspace"]),
        ("\x1b", ["escape"]),
        ("a\x1b[5~\x1b[6~", ["a", "page up", "page down"]),
        ("", []),
    ],
)
def test_what_a_terminal_sends_is_named(text: str, keys: list[str]) -> None:
    assert parse_keys(text) == keys


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of a terminal that is standard input."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


async def test_keys_come_one_at_a_time_and_the_terminal_is_as_before(terminal: int) -> None:
    before = termios.tcgetattr(sys.stdin.fileno())
    found: list[str] = []
    with one_key_at_a_time():
        assert not termios.tcgetattr(sys.stdin.fileno())[3] & (termios.ICANON | termios.ECHO)
        os.write(terminal, b"a\x1b[A")
        with anyio.fail_after(20):
            async for key in read_keys():
                found.append(key)
                if len(found) == 2:
                    break
    assert found == ["a", "up"]
    assert termios.tcgetattr(sys.stdin.fileno()) == before
