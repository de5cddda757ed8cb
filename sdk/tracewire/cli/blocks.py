"""Blocks in Python files, as options name them: `FILE.py::NAME`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tracewire.capture.intervention import Intervention

__all__ = ["BLOCK", "load_block"]

#: The form of the option.
BLOCK = "FILE.py[::NAME]"


def load_block(where: str) -> Intervention:
    """The block of a Python file that `where` names: `FILE.py::NAME`, or `FILE.py` if it has one. Executes the file.

    Raises:
        ValueError: there is no such file, or no such block in it.
    """
    path, name = _split(where)
    if not path.is_file():
        raise ValueError(f"expected a Python file, got {str(path)!r} (the form is {BLOCK})")
    module = ModuleType(f"tracewire_block_{path.stem}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        # From its source: Python would take cached bytecode of a file that has changed within the same second.
        # The caller has named the file for its code to be run.
        exec(compile(path.read_bytes(), module.__file__, "exec"), vars(module))  # noqa: S102  # nosec B102
    finally:
        sys.path.remove(folder)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Intervention)}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    there = ", ".join(sorted(found)) or "none"
    asked = f"no intervention {name!r}" if name else "several interventions, or none: name one, as FILE.py::NAME"
    raise ValueError(f"{path} has {asked} (it has: {there}); @tracewire.intervention makes a function one")


def _split(where: str) -> tuple[Path, str]:
    if Path(where).is_file():
        return Path(where), ""
    for colon in ("::", ":"):
        file, found, name = where.rpartition(colon)
        if found and file:
            return Path(file), name
    return Path(where), ""
