"""Python's syntax tree of a source text, in processes of several threads."""

from __future__ import annotations

import ast
from typing import Final

__all__ = ["parse_source"]

#: How often a parse is begun that other parses disturb.
_ATTEMPTS: Final = 10


def parse_source(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parse a source text, also while other threads parse.

    Before 3.13, CPython counts the depth of all trees that it is building in one place. Where the garbage collector
    lets another thread parse in between, `ast.parse` raises `SystemError` for a source that is valid (CPython's issue
    106905). The parse is then begun again.

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
