"""Blocks in Python files, as options name them: `FILE.py::NAME`."""

from __future__ import annotations

import sys
import traceback
from importlib import util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from tracewire.capture.intervention import Intervention

__all__ = ["BLOCK", "load_block", "load_function"]

#: The form of the option.
BLOCK = "FILE.py[::NAME]"


def load_block(where: str) -> Intervention:
    """The block of a Python file that `where` names: `FILE.py::NAME`, or `FILE.py` if it has one. Executes the file.

    Raises:
        ValueError: there is no such file, no such block in it, or executing it raised an error.
    """
    path, name = _split(where)
    found = {key: value for key, value in _executed(path).items() if isinstance(value, Intervention)}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    there = ", ".join(sorted(found)) or "none"
    asked = f"no intervention {name!r}" if name else "several interventions, or none: name one, as FILE.py::NAME"
    raise ValueError(f"{path} has {asked} (it has: {there}); @tracewire.intervention makes a function one")


def load_function(where: str) -> Any:
    """The function of a Python file that `where` names: `FILE.py::NAME`. Executes the file.

    Raises:
        ValueError: there is no such file, no such function in it, or executing it raised an error.
    """
    path, name = _split(where)
    found = _executed(path).get(name)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}")
    return found


def _executed(path: Path) -> dict[str, Any]:
    """The names that a Python file defines."""
    if not path.is_file():
        what = "which is no file" if path.exists() else "which does not exist"
        raise ValueError(f"expected a Python file, got {str(path)!r}, {what} (the form is {BLOCK})")
    name_of_module = f"tracewire_block_{path.stem}"
    loader = _UncachedLoader(name_of_module, str(path))
    spec = util.spec_from_loader(name_of_module, loader)
    assert spec is not None
    module = util.module_from_spec(spec)
    sys.modules[name_of_module] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ValueError(_raised(path, error)) from error
    finally:
        sys.path.remove(folder)
    return vars(module)


def _raised(path: Path, error: Exception) -> str:
    """What an error says that executing a file raised, with the last line of that file that it passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        where, what = f"{error.filename or path}:{error.lineno}", error.msg
    else:
        where, what = f"{path}:{lines[-1]}" if lines else str(path), str(error)
    return f"{where}: {type(error).__name__}: {what}"


class _UncachedLoader(SourceFileLoader):
    """Compiles a file as it is now. Python would execute bytecode cached within the second of the last change."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _split(where: str) -> tuple[Path, str]:
    if Path(where).is_file():
        return Path(where), ""
    for colon in ("::", ":"):
        file, found, name = where.rpartition(colon)
        if found and file:
            return Path(file), name
    return Path(where), ""
