"""Lua scripts, executed by their digests.

A `Script` makes commands, which can be sent like any others. If Redis does not have a script cached, `Link.execute`
sends the script's text in the same call.

Each file of `tracewire_bus/lua` is one script. A line `-- #include NAME` defines the local `NAME` in a script, with the
value that `lua/shared/NAME.lua` defines. All keys that a script accesses share one hash tag, so that it runs on Redis
Cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import Any, Final

__all__ = ["FOLDER", "Script", "assemble", "with_text"]

#: The folder of the scripts.
FOLDER: Final = Path(__file__).resolve().parent.parent / "lua"

_INCLUDE: Final = re.compile(r"^-- #include (\w+)$", re.MULTILINE)
#: Comments and indentation, which are removed: a script before an `AfterOthers` is sent with its text.
_COMMENT: Final = re.compile(r"^\s*(--.*)?\n?|^\s+", re.MULTILINE)

#: The texts of scripts by digest.
_texts: dict[str, str] = {}


class Script:
    """A script: `script(keys, *arguments)` is the command that runs it.

    Args:
        name: the script is the file `lua/NAME.lua`.
        text: the script's text, in place of a file.
    """

    def __init__(self, name: str = "", *, text: str = "") -> None:
        self._name, self._text = name, text

    @cached_property
    def digest(self) -> str:
        """The SHA-1 digest of the script's text, by which Redis caches the script."""
        text = self._text or assemble(self._name)
        digest = sha1(text.encode(), usedforsecurity=False).hexdigest()
        _texts[digest] = text
        return digest

    def __call__(self, keys: Sequence[str | bytes], *arguments: Any) -> tuple[Any, ...]:
        """The command that runs the script with `keys` and `arguments` (str, bytes, int or float)."""
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


def assemble(name: str) -> str:
    """The text of a script, preceded by the modules that it includes, directly or not, each once."""
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
    """A script's command with the script's text in place of the digest; None for a command without a script.

    Redis caches the script when it executes the command.
    """
    text = _texts.get(command[1]) if command[0] == "EVALSHA" else None
    return None if text is None else ("EVAL", text, *command[2:])
