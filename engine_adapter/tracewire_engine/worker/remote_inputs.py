"""Submissions' large variables on a machine that cannot see the adapter's files: in the memory of each worker.

The adapter sends a file of the link's folder in pieces, between steps (`VllmEngine.carry`). Each is kept in a file
without a name, which goes with its process and is mapped as the adapter's own would be.
"""

from __future__ import annotations

import os
from pathlib import Path

from tracewire_engine.link.addresses import is_remote
from tracewire_engine.protocol.keys import inputs_folder

__all__ = ["RemoteInputs", "inputs_at"]


class RemoteInputs:
    """The large variables that this worker was sent, by the names of the adapter's files."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def __truediv__(self, name: str) -> Path:
        """Where to read the one of this name, as in a folder."""
        # A name that nobody sent exists nowhere, and is said to be missing.
        return Path(f"/proc/self/fd/{self._files[name]}" if name in self._files else f"/nonexistent/{name}")

    def write(self, name: str, offset: int, piece: bytes) -> None:
        """Keep a piece. The one at offset 0 begins anew."""
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


def inputs_at(link_address: str) -> Path | RemoteInputs:
    """Where a worker finds large variables: the adapter's own folder on its machine, else what it will be sent."""
    return RemoteInputs() if is_remote(link_address) else inputs_folder(link_address)
