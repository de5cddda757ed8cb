"""The names of the files for a submission's large values, which the adapter writes and the workers map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from tracewire_bus.wire.refs import ArrayRef

__all__ = ["InputFolder", "input_path", "used_file", "vector_path"]

_T = TypeVar("_T")


class InputFolder(Protocol):
    """A folder, or on another machine the files that a worker was sent (`RemoteInputs`)."""

    def __truediv__(self, name: str, /) -> Path:
        """The path of the file of this name."""
        ...


def input_path(folder: InputFolder, ref: ArrayRef) -> Path:
    """The file in `folder` that holds the elements of an array."""
    return folder / f"input-{ref.digest.hex()}"


def vector_path(folder: InputFolder, ref: ArrayRef) -> Path:
    """The file in `folder` that holds the elements of a vector of declared interventions."""
    return folder / ref.blob


def used_file(find: Callable[[], Path], use: Callable[[Path], _T]) -> _T:
    """What `use` makes of the file at the path that `find` returns.

    Several adapters of an engine may hold the same file. Each removes its own when no trace of its own needs it, so a
    file that is removed meanwhile is looked for again.

    Raises:
        Exception: what `use` raises, if no adapter holds the file.
    """
    while True:
        path = find()
        try:
            return use(path)
        except Exception:
            if path.exists() or find() == path:
                raise
