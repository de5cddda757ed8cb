"""Lua scripts, sent by their digests.

A `Script` makes commands, which stand alone or between others wherever commands do. A
Redis that does not know a script yet, or any more (with many of them it forgets some), is sent its text by the same
call: see `Link.ask`.

All keys that a script touches share one hash tag, so that it runs on Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from typing import Any

__all__ = ["Script", "with_text"]

#: Texts by digest.
_texts: dict[str, str] = {}


class Script:
    """A script by its text, made once: `SCRIPT(keys, *arguments)` is the command that runs it."""

    __slots__ = ("digest",)

    def __init__(self, text: str) -> None:
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
        _texts[self.digest] = text

    def __call__(self, keys: Sequence[str | bytes], *arguments: Any) -> tuple[Any, ...]:
        """The command. `arguments` are what a command takes: str, bytes, int or float."""
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


def with_text(command: Sequence[Any]) -> tuple[Any, ...] | None:
    """A script's command with the text in place of the digest, which Redis then knows; None for any other command."""
    text = _texts.get(command[1]) if command[0] == "EVALSHA" else None
    return None if text is None else ("EVAL", text, *command[2:])
