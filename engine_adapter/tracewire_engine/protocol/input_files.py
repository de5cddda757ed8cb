"""The names of the files for a submission's large values, which the adapter writes and the workers map."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tracewire_bus.wire.refs import ArrayRef

__all__ = ["InputFolder", "input_path", "vector_path"]


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
