"""Limits the memory that large arrays of hosts take in the worker while they wait to be sent to the adapter.

With each turn the worker tells a host how many bytes of large arrays it may send (`Turn.large_allowed`). A host refuses
a save for which there is no room, and names it in the trace's save errors. So hosts meet the limits here only if a
hostile block has taken them over, or if very many send at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_engine.protocol.block_host import LARGE_OF_HOST

from .untrusted_reports import UntrustedReport

if TYPE_CHECKING:
    from .host import BlockHost

__all__ = ["PassedArrays"]

#: How many bytes of all hosts may wait, and how many of one host while half as many of all do.
_OF_ALL, _SHORT = 8 << 30, 64 << 20


class PassedArrays:
    """Counts the bytes of all hosts' large arrays that have come and have not been sent.

    Args:
        of_host: how many bytes of one host may wait.
        of_all: how many bytes of all hosts may wait.
        short: how many bytes of one host may wait when half of `of_all` do.
    """

    def __init__(self, of_host: int = LARGE_OF_HOST, of_all: int = _OF_ALL, short: int = _SHORT) -> None:
        self._of_host, self._of_all, self._short = of_host, of_all, short
        # One thread at a time takes arrays in, and another one sends them.
        self._come = self._sent = 0

    def take(self, host: BlockHost, nbytes: int) -> None:
        """Count bytes that have come from a host.

        Raises:
            UntrustedReport: the host has sent more than it may.
        """
        host.large_come += nbytes
        waits = host.large_come - host.large_sent
        most = self._short if self._come - self._sent + nbytes > self._of_all else self._of_host
        if waits > most + CHUNK_BYTES:
            raise UntrustedReport(
                f"{waits} bytes of large arrays wait for the bus, of which a host has sent more than it may"
            )
        self._come += nbytes

    def sent(self, host: BlockHost, nbytes: int) -> None:
        """Count bytes of a host as sent."""
        self._sent += nbytes
        host.large_sent += nbytes
        most = self._short if 2 * (self._come - self._sent) > self._of_all else self._of_host
        host.large_allowed = host.large_sent + most
