"""The builtins of a block that may import only some packages.

This keeps a block that an operator has read, or whose author has the right to ship code, to the packages that the
operator allows. It contains no hostile code: Python code in a process can reach everything in that process.
"""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from tracewire_bus.domain.code_identity import allows

__all__ = ["limited_builtins"]


def limited_builtins(allowed: Collection[str]) -> dict[str, Any]:
    """Python's builtins, with an `import` that refuses all but the `allowed` packages and the modules below them."""

    def load(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if level or not allows(name, allowed):
            shown = "." * level + name
            raise ImportError(f"a block may not import {shown!r} here (--code-imports)", name=shown)
        return builtins.__import__(name, globals, locals, fromlist, level)

    return {**builtins.__dict__, "__import__": load}
