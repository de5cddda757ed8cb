"""The packages of the extra `tracewire[library]`, each imported when it is first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tracewire.errors import LibraryMissing

__all__ = ["package"]


def package(name: str, what: str = "this file", extra: str = "library") -> Any:
    """Import a package that an extra installs.

    Raises:
        LibraryMissing: the package is not installed; the error names the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryMissing(what, name.partition(".")[0], extra) from error
