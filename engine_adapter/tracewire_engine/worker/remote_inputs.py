"""Keeps the large variables of submissions in a worker on a machine that cannot see the adapter's files.

The adapter sends each file in pieces, between steps (`VllmEngine.carry`). The worker keeps it in an anonymous file in
memory, which ends with the worker's process and which it maps as it would map the adapter's own file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tracewire_engine.link.addresses import is_remote
from tracewire_engine.protocol.adapters import address_of
from tracewire_engine.protocol.keys import inputs_folder

__all__ = ["RemoteInputs", "SharedInputs", "inputs_at"]


class RemoteInputs:
    """The large variables that this worker was sent, by the names of the adapter's files."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __truediv__(self, name: str) -> Path:
        """The path at which to read the file of this name, as with a `Path` of a folder."""
        # For a name that the adapter has not sent, a path that does not exist: opening it raises FileNotFoundError.
        return Path(f"/proc/self/fd/{self._files[name]}" if name in self._files else f"/nonexistent/{name}")

    def write(self, name: str, offset: int, piece: bytes) -> None:
        """Keep a piece of a file. A piece at offset 0 begins the file anew.

        Args:
            name: of the adapter's file.
            offset: where the piece begins, in bytes.
            piece: the bytes.
        """
        if offset == 0:
            self.drop(name)
            self._files[name] = os.memfd_create(f"tracewire-{name}")
        view = memoryview(piece)
        while view:
            written = os.pwrite(self._files[name], view, offset)
            view, offset = view[written:], offset + written

    def drop(self, name: str) -> None:
        """Forget a file, if it is there. Processes that have mapped the file keep it."""
        descriptor = self._files.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)


class SharedInputs:
    """The folders of several adapters on the same machine, which hold the same file under the same name."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def __truediv__(self, name: str) -> Path:
        """The path of a file of this name in one of the folders."""
        paths = [folder / name for folder in self._folders]
        return next((path for path in paths if path.exists()), paths[0])


def inputs_at(link_address: str, adapters: int = 1) -> Path | RemoteInputs | SharedInputs:
    """Where a worker finds large variables: in the adapters' folders on the same machine, or else sent to it."""
    if is_remote(link_address):
        return RemoteInputs()
    folders = [inputs_folder(address_of(link_address, adapter)) for adapter in range(adapters)]
    return folders[0] if adapters == 1 else SharedInputs(folders)
