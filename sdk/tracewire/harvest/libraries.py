"""The libraries of the extra `tracewire[harvest]`, each imported when it is first needed."""

from __future__ import annotations

from typing import Any

from tracewire.library.packages import package

__all__ = ["library"]


def library(name: str, what: str = "a harvest", extra: str = "harvest") -> Any:
    """Import a library that one of the package's extras installs.

    Raises:
        LibraryMissing: the library is not installed; the error names the extra.
    """
    return package(name, what, extra)
