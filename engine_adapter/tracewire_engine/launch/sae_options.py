"""The engine's own sparse autoencoders, by its options."""

from __future__ import annotations

from collections.abc import Iterable

from tracewire_bus.domain.autoencoders import SparseAutoencoder, WrongAutoencoder
from tracewire_bus.wire.feature_kinds import Autoencoder

__all__ = ["described"]


def described(saes: Iterable[tuple[str, str]]) -> dict[str, Autoencoder]:
    """What the autoencoders of `--sae NAME=FOLDER` are, by name.

    Raises:
        ValueError: a folder has none that can be used, or two have one name.
    """
    found: dict[str, Autoencoder] = {}
    for name, folder in saes:
        if name in found:
            raise ValueError(f"--sae {name}={folder}: there are two of this name")
        try:
            found[name] = SparseAutoencoder.load(folder).description
        except (WrongAutoencoder, OSError, ModuleNotFoundError) as error:
            raise ValueError(f"--sae {name}={folder}: {error}") from error
    return found
