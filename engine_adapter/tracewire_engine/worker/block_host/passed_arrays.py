"""Limits the memory that large arrays of hosts take in the worker while they wait to be sent to the adapter.

With each turn the worker tells a host how many bytes of large arrays it may have sent (`Turn.large_allowed`). A host
refuses a save for which there is no room, and names it in the trace's save errors. The worker ends a host that sends
more than it was told.

Hosts may use what they were told at the same time. If more waits than the worker has room for, it ends the host of
which the most waits, and drops that. What follows a trace's large arrays waits behind them, and counts here, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.block_host import LARGE_OF_HOST
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

from .untrusted_reports import UntrustedReport

__all__ = ["HostArrays", "PassedArrays", "PassedMessage"]

#: How many bytes of all hosts may wait, and how many of one host in any case.
_OF_ALL, _LEAST = 8 << 30, 64 << 20

#: What a message takes beside its content, at most, in bytes.
_BESIDE = 1 << 10

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class HostArrays:
    """Counts what has come of one host."""

    def __init__(self) -> None:
        #: How many bytes of large arrays it was told that it may have sent, at most.
        self.told = LARGE_OF_HOST
        #: How many bytes of large arrays have come, and do not wait any more.
        self.come = self.gone = 0
        #: How many bytes wait, those of messages behind large arrays among them.
        self.waiting = 0
        self.messages: set[PassedMessage] = set()


class PassedMessage:
    """A message of a host that waits to be sent to the adapter: a piece of a large array, or what follows some."""

    def __init__(self, passed: PassedArrays, arrays: HostArrays, message: BlobChunk | Report, data: bytes) -> None:
        self._passed, self._arrays, self._message, self._data = passed, arrays, message, data
        self.size = len(data) + sum(len(memoryview(one.deltas)) for one in self._records())

    @property
    def large(self) -> bool:
        """Whether it is a piece of a large array."""
        return isinstance(self._message, BlobChunk)

    def send(self) -> bytes | None:
        """Count it as sent. Returns the bytes that go with it; `None` if it is not to be sent."""
        data = self._data
        return data if self._passed.leave(self, self._arrays) or not self.large else None

    def drop(self) -> None:
        """Give up its bytes."""
        self._data = b""
        for one in self._records():
            one.deltas = _NO_DELTAS
        self._passed.leave(self, self._arrays)

    def _records(self) -> list[StepRecord | FinishRecord]:
        return [*self._message.steps, *self._message.finishes] if isinstance(self._message, Report) else []


class PassedArrays:
    """The large arrays of all hosts. One thread at a time takes in what comes, and another one sends it.

    Args:
        of_host: how many bytes of one host may wait.
        of_all: how many bytes of all hosts may wait.
        least: how many bytes of one host may wait, however many of others do.
    """

    def __init__(self, of_host: int = LARGE_OF_HOST, of_all: int = _OF_ALL, least: int = _LEAST) -> None:
        self._of_host, self._of_all, self._least = of_host, of_all, least
        self._waiting = 0
        self._lock = threading.Lock()

    def allow(self, arrays: HostArrays) -> int:
        """How many bytes of large arrays a host may have sent when it has its next turn, which tells it so."""
        with self._lock:
            others = self._waiting - arrays.waiting
            allowed = arrays.gone + max(self._least, min(self._of_host, self._of_all - others))
            arrays.told = max(arrays.told, allowed)
            return allowed

    def take(self, arrays: HostArrays, message: BlobChunk | Report, data: bytes = b"") -> PassedMessage:
        """Count a message that has come from a host.

        Raises:
            UntrustedReport: the host has sent more than it was told that it may.
        """
        taken = PassedMessage(self, arrays, message, data)
        with self._lock:
            if taken.large:
                arrays.come += taken.size
                if arrays.come > arrays.told + CHUNK_BYTES:
                    raise UntrustedReport(f"{arrays.come} bytes of large arrays, where {arrays.told} were allowed")
            arrays.messages.add(taken)
            arrays.waiting += taken.size + _BESIDE
            self._waiting += taken.size + _BESIDE
        return taken

    def leave(self, message: PassedMessage, arrays: HostArrays) -> bool:
        """Count a message as one that does not wait any more. Returns whether it did."""
        with self._lock:
            if message not in arrays.messages:
                return False
            arrays.messages.remove(message)
            arrays.waiting -= message.size + _BESIDE
            self._waiting -= message.size + _BESIDE
            if message.large:
                arrays.gone += message.size
            return True

    def too_many(self, hosts: Iterable[HostArrays]) -> HostArrays | None:
        """The host of which the most waits, if more of all hosts waits than there is room for."""
        if self._waiting <= self._of_all:
            return None
        return max(hosts, key=lambda arrays: arrays.waiting, default=None)

    def drop(self, arrays: HostArrays) -> None:
        """Give up what waits of a host."""
        for message in list(arrays.messages):
            message.drop()
