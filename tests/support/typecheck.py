"""Checks the types of the examples' programs, and of what the client's types must accept and refuse.

    python -m tests.support.typecheck

mypy and pyright, both strict, look at `examples/programs`, the cells of its notebook among them, at the whole modules
in `docs/howto`, and at `tests/support/typed.py`. Exits with 1 if either finds anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.support import ROOT
from tests.support.cells import blocks

__all__ = ["cells", "check", "main", "mypy"]

PROGRAMS = ROOT / "examples" / "programs"
HOWTO = ROOT / "docs" / "howto"
#: The pages whose code is a module of its own.
TYPED_PAGES = ("fastapi", "script", "typing")
SOURCES = [ROOT / folder for folder in ("bus", "sdk")]
#: Mypy's own files, for the next run.
CACHE = ROOT / ".mypy_cache" / "programs"


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, by cell."""
    found = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def _as_program(notebook: Path) -> str:
    """A notebook's cells as the body of a coroutine function, which is where one may await."""
    return "async def main() -> None:\n" + textwrap.indent("\n\n".join(cells(notebook)), "    ") + "\n"


def check(paths: list[Path], folder: Path) -> str:
    """What mypy and pyright have against these files; `""` for nothing. `folder` is for their own files."""
    # Their environment has the libraries, and no installed copy of the package before its source.
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    # Read where pyright runs.
    (folder / "pyrightconfig.json").write_text(
        json.dumps(
            {
                "extraPaths": [str(path) for path in SOURCES],
                "pythonVersion": "3.11",
                "enableTypeIgnoreComments": False,
                "reportUnnecessaryTypeIgnoreComment": "error",
                "reportUnusedExpression": False,
                "reportUnusedCoroutine": "error",
            }
        )
    )
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *map(str, paths)]
    return mypy(paths, folder) + _said(pyright, folder, environment)


def mypy(paths: list[Path], folder: Path) -> str:
    """What mypy has against these files; `""` for nothing."""
    options = [
        *(
            "--strict",
            "--config-file=",
            "--follow-imports=silent",
            "--cache-dir",
            str(CACHE),
        ),
        *("--python-version", "3.11", "--no-error-summary", "--scripts-are-modules"),
    ]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, SOURCES))}
    return _said([sys.executable, "-m", "mypy", *options, *map(str, paths)], folder, environment)


def _said(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    """Check them, and print what is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        notebook = Path(temporary) / "notebook.py"
        notebook.write_text(_as_program(PROGRAMS / "notebook.ipynb"))
        pages = [Path(temporary) / f"howto_{name}.py" for name in TYPED_PAGES]
        for name, path in zip(TYPED_PAGES, pages, strict=True):
            path.write_text("".join(blocks(HOWTO / f"{name}.md", "python")))
        programs = [*sorted(PROGRAMS.glob("*.py")), notebook, *pages]
        found = check([*programs, ROOT / "tests/support/typed.py"], Path(temporary))
    print(found, end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
