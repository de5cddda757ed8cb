"""Sparse autoencoders in the library: kept in the layout of SAELens, tensors as arrays, configuration as settings."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracewire.errors import InvalidEntry
from tracewire_bus.domain.autoencoders import SparseAutoencoder, WrongAutoencoder

from .files import VectorFile, read
from .packages import package

if TYPE_CHECKING:
    from .entry import LibraryEntry

__all__ = ["made", "taken_apart"]


def taken_apart(one: SparseAutoencoder) -> VectorFile:
    """The arrays of an autoencoder, and the options of its entry: its kind, model, location and settings.

    Raises:
        LibraryMissing: the package safetensors is not installed.
    """
    package("safetensors", "an autoencoder of the library")
    with tempfile.TemporaryDirectory() as folder:
        one.save(folder)
        found = read(folder)
    said = one.description
    return VectorFile(found.arrays, {**found.options, "provenance": {}, "model": said.model, "at": said.at})


def made(entry: LibraryEntry, arrays: Mapping[str, Any]) -> SparseAutoencoder:
    """The autoencoder of an entry, with the entry's model and location.

    Raises:
        InvalidEntry: the entry is no autoencoder, or one that is not supported.
        LibraryMissing: the package safetensors is not installed.
    """
    if entry.kind != "autoencoder":
        raise InvalidEntry(entry.id, "kind", f"expected an autoencoder, got a {entry.kind}")
    data = package("safetensors.numpy", "an autoencoder of the library").save(dict(arrays))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cfg.json").write_text(json.dumps(entry.settings))
        (Path(folder) / "sae_weights.safetensors").write_bytes(data)
        try:
            return SparseAutoencoder.load(folder, model=entry.model, at=entry.at)
        except WrongAutoencoder as error:
            raise InvalidEntry(entry.id, "settings", str(error)) from None
