"""Lua scripts, sent by their digests.

A [`Script`][tracewire_bus.scripts.Script] makes commands for `Connections.command`, `Connections.commands` and
`Link.ask`, alone or between others. A Redis that does not know a script is sent its text by the same call, once.

All keys that a script touches share one hash tag, so that it runs on Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from typing import Any

__all__ = ["Call", "Script"]


class Script:
    """A script by its text; `SCRIPT(keys, *arguments)` is the command that runs it."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str | bytes], *arguments: Any) -> Call:
        """The command. `arguments` are what a command takes: str, bytes, int or float."""
        call = Call(("EVALSHA", self.digest, len(keys), *keys, *arguments))
        call.script = self
        return call


class Call(tuple[Any, ...]):
    """A command that runs a script by its digest."""

    script: Script

    def with_text(self) -> tuple[Any, ...]:
        """The same by the script's text, which Redis then knows."""
        return ("EVAL", self.script.text, *self[2:])
