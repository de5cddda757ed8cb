"""Python's syntax tree of a source text, in processes of several threads."""

from __future__ import annotations

import ast
from typing import Final

__all__ = ["parse_source"]

#: How often `parse_source` tries a parse that other parses disturb.
_ATTEMPTS: Final = 10


def parse_source(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parse a source text, also while other threads parse.

    Before 3.13, all parses of CPython share one counter of their depth. If another thread parses in between, during a
    garbage collection, `ast.parse` raises `SystemError` for a valid source (CPython's issue 106905). This function then
    parses again.

    Raises:
        SyntaxError: `source` is not valid Python.
        ValueError: `source` has a null byte.
        RecursionError, MemoryError: `source` is nested too deeply.
        SystemError: other parses disturbed each of 10 attempts.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source, filename)
        except SystemError:
            continue
    return ast.parse(source, filename)
