"""Blocks in Python files, as options name them: `FILE.py::NAME`."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

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
    spec = util.spec_from_file_location(f"tracewire_block_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"expected a Python file, got {str(path)!r} (the form is {BLOCK})")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
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
