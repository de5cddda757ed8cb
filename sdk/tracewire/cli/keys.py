"""Keys of a terminal, one at a time and without an echo."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio

__all__ = ["one_key_at_a_time", "parse_keys", "read_keys"]

_SEQUENCES = {
    "[A": "up",
    "[B": "down",
    "[C": "right",
    "[D": "left",
    "OA": "up",
    "OB": "down",
    "OC": "right",
    "OD": "left",
    "[5~": "page up",
    "[6~": "page down",
}
_SINGLE = {"\r": "enter", "\n": "enter", "\x1b": "escape", "\t": "tab", "\x7f": "backspace", "\x03": "interrupt"}


def parse_keys(text: str) -> list[str]:
    """The names of the keys that make a terminal send `text`: a character, or a word such as `up` or `enter`."""
    found = []
    while text:
        if text[0] == "\x1b":
            sequence = next((one for one in _SEQUENCES if text.startswith(one, 1)), None)
            if sequence is not None:
                found.append(_SEQUENCES[sequence])
                text = text[1 + len(sequence) :]
                continue
        found.append(_SINGLE.get(text[0], text[0]))
        text = text[1:]
    return found


@contextmanager
def one_key_at_a_time() -> Iterator[None]:
    """Have the terminal hand over each key at once, and print none. Ctrl-C stays a signal."""
    # Imported here: not every system has them.
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def read_keys() -> AsyncIterator[str]:
    """The keys as they come, until standard input ends."""
    descriptor = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(descriptor)
        data = os.read(descriptor, 1024)
        if not data:
            return
        for key in parse_keys(data.decode("utf-8", "replace")):
            yield key
