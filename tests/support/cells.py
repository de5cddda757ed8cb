"""Code that is run cell by cell, as a notebook runs it: of notebooks, and of the pages of the documentation."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from pathlib import Path
from typing import Any

__all__ = ["blocks", "run_cell", "run_page"]


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of these languages."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind in kinds]


async def run_cell(cell: str, name: str, scope: dict[str, Any]) -> Any:
    """Run a cell, which may await, in `scope`. Returns the value of its last expression."""
    # As IPython keeps it, where the client finds the source of blocks.
    linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
    tree = ast.parse(cell)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
    code = compile(ast.fix_missing_locations(tree), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = eval(code, scope)
    if inspect.isawaitable(found):
        await found
    return scope.pop("_", None)


async def run_page(page: Path, scope: dict[str, Any], **replaced: str) -> list[Any]:
    """Run a page's Python blocks one after the other in `scope`. Returns the value of each one's last expression.

    Args:
        replaced: URLs of the page's processes to put in place of those that the page has: `redis` and `gateway`.
    """
    urls = {"redis": "redis://localhost", "gateway": "http://localhost:8080"}
    values = []
    for number, cell in enumerate(blocks(page, "python")):
        for name, url in replaced.items():
            cell = cell.replace(urls[name], url)
        values.append(await run_cell(cell, f"<{page.stem} {number}>", scope))
    return values
