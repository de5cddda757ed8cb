"""The libraries of the extra `tracewire[harvest]`, each imported when it is first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tracewire.errors import LibraryMissing

__all__ = ["library"]


def library(name: str, what: str = "a harvest", extra: str = "harvest") -> Any:
    """Import a library that one of the package's extras installs.

    Raises:
        LibraryMissing: the library is not installed; the error names the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryMissing(what, name.partition(".")[0], extra) from error
