"""Lua scripts, sent by their digests.

A `Script` makes commands, which stand alone or between others wherever commands do. Where Redis does not know a script,
or has dropped it from its cache, the same call sends the script's text: see `Link.ask`.

The scripts are the files of `tracewire_bus/lua`, one each. A line `-- #include NAME` gives a script the local `NAME`,
which `lua/shared/NAME.lua` makes. All keys that a script touches share one hash tag, so that it runs on Redis Cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import Any, Final

__all__ = ["FOLDER", "Script", "assemble", "with_text"]

#: Where the scripts are.
FOLDER: Final = Path(__file__).resolve().parent.parent / "lua"

_INCLUDE: Final = re.compile(r"^-- #include (\w+)$", re.MULTILINE)
#: Of a line, what Redis need not be sent: scripts that must not be overtaken travel with their text.
_COMMENT: Final = re.compile(r"^\s*(--.*)?\n?|^\s+", re.MULTILINE)

#: Texts by digest.
_texts: dict[str, str] = {}


class Script:
    """The script of the file `lua/NAME.lua`, or of a text: `SCRIPT(keys, *arguments)` is the command that runs it."""

    def __init__(self, name: str = "", *, text: str = "") -> None:
        self._name, self._text = name, text

    @cached_property
    def digest(self) -> str:
        """The SHA-1 digest by which Redis knows the script."""
        text = self._text or assemble(self._name)
        digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
        _texts[digest] = text
        return digest

    def __call__(self, keys: Sequence[str | bytes], *arguments: Any) -> tuple[Any, ...]:
        """The command. `arguments` are what a command takes: str, bytes, int or float."""
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


def assemble(name: str) -> str:
    """The text of a script, behind the modules that it includes, each of them once and behind its own."""
    modules: dict[str, str] = {}

    def read(path: Path) -> str:
        text = path.read_text(encoding="utf-8")
        for module in _INCLUDE.findall(text):
            if module not in modules:
                body = read(FOLDER / "shared" / f"{module}.lua")
                modules[module] = f"local {module} = (function()\n{body}return {module}\nend)()\n"
        return _COMMENT.sub("", text)

    script = read(FOLDER / f"{name}.lua")
    return "".join(modules.values()) + script


def with_text(command: Sequence[Any]) -> tuple[Any, ...] | None:
    """A script's command with the text in place of the digest, which Redis then knows; None for any other command."""
    text = _texts.get(command[1]) if command[0] == "EVALSHA" else None
    return None if text is None else ("EVAL", text, *command[2:])
