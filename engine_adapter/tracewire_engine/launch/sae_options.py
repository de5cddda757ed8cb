"""The engine's own sparse autoencoders, by its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tracewire_bus.domain.autoencoders import SparseAutoencoder, WrongAutoencoder
from tracewire_bus.wire.feature_kinds import Autoencoder
from tracewire_engine.protocol.autoencoder_parts import parts_of, size_in_bytes

__all__ = ["check_room", "described"]


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


def check_room(
    saes: Mapping[str, Autoencoder], ranks: int, device: int, host: int, split_above: int | None = None
) -> None:
    """Check that each of the engine's autoencoders has room where no other one is in use.

    Args:
        saes: what they are, by name.
        ranks: how many tensor-parallel ranks the engine has.
        device, host: how many bytes all may take, of a device and of the host's memory.
        split_above: the ranks split an autoencoder of more bytes; `None` for those of more than `device`.

    Raises:
        ValueError: one has no room.
    """
    for name, one in saes.items():
        parts = parts_of(one, ranks, device if split_above is None else split_above)
        # The last rank has the most features.
        needed = size_in_bytes(one, parts - 1, parts)
        if needed > max(device, host):
            where = "" if ranks == 1 else f" on each of {ranks} ranks" + (", which split it" if parts > 1 else "")
            raise ValueError(
                f"--sae {name}: an autoencoder of {one.features} features of width {one.width} takes {needed} bytes"
                f"{where}; expected at most {device} (--sae-bytes), or {host} (--sae-host-bytes)"
            )
