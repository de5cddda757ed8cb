"""Runs the notebooks of the cookbook, and saves what they put out.

    TRACEWIRE_URL=URL python -m tests.support.cookbook [NAME.ipynb ...]

runs them, or all, on the engine of that Redis. A notebook whose cells all ran is written with its outputs.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import nbclient
import nbformat

from tests.support import ROOT
from tests.support.jupyter import kernel_environment

__all__ = ["COOKBOOK", "CUT", "checks", "executed", "failed", "notebooks", "output_bytes", "saved"]

COOKBOOK = ROOT / "examples" / "cookbook"
#: The tag of a cell that may raise: nbclient passes over its error.
CUT = "raises-exception"
#: How long one cell may run, in seconds.
PATIENCE = 300


def notebooks() -> list[Path]:
    """The cookbook's notebooks, by name."""
    return sorted(COOKBOOK.glob("*.ipynb"))


def saved(path: Path) -> nbformat.NotebookNode:
    """A notebook as its file has it."""
    return nbformat.read(path, as_version=4)


def checks(notebook: nbformat.NotebookNode) -> int:
    """How many assertions its cells make."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    trees = [compile(cell.source, "cell", "exec", flags) for cell in notebook.cells if cell.cell_type == "code"]
    return sum(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree))


def failed(notebook: nbformat.NotebookNode) -> list[str]:
    """The assertions that failed in its run."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    errors = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
    # IPython points at the line of the cell, in colours.
    return [
        match[1]
        for error in errors
        for match in re.finditer(r"^-+> \d+ (.*)$", re.sub(r"\x1b\[[0-9;]*m", "", error), re.M)
    ]


def output_bytes(notebook: nbformat.NotebookNode) -> int:
    """The size of all its outputs in its file."""
    return sum(len(json.dumps(cell.get("outputs", []))) for cell in notebook.cells)


async def executed(path: Path, environment: Mapping[str, str], *, findings: bool = False) -> nbformat.NotebookNode:
    """The notebook after a run of all its cells in a kernel of its own.

    Args:
        path: its file.
        environment: of the kernel.
        findings: go on behind an assertion that fails: the experiment came out otherwise.

    Raises:
        CellExecutionError: a cell raised.
    """
    made = saved(path)
    folder = {"metadata": {"path": str(path.parent)}}
    run = nbclient.NotebookClient(
        made,
        timeout=PATIENCE,
        resources=folder,
        record_timing=False,
        allow_error_names=["AssertionError"] if findings else [],
    )
    await run.async_execute(env={**kernel_environment(), **environment})
    nbformat.validate(made)
    return made


async def _save(paths: list[Path]) -> None:
    for path in paths:
        made = await executed(path, {})
        # Which kernel ran it is nobody's business.
        made.metadata.pop("language_info", None)
        nbformat.write(made, path)
        print(f"{path.name}: {checks(made)} checks held, {output_bytes(made)} bytes of outputs")


if __name__ == "__main__":
    anyio.run(_save, [COOKBOOK / name for name in sys.argv[1:]] or notebooks())
