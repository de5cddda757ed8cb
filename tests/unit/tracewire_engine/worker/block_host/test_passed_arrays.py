"""How many bytes of hosts' large arrays may wait in the worker."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_engine.protocol.block_host import LARGE_OF_HOST
from tracewire_engine.worker.block_host.passed_arrays import PassedArrays
from tracewire_engine.worker.block_host.untrusted_reports import UntrustedReport


class Host:
    def __init__(self) -> None:
        self.large_allowed, self.large_come, self.large_sent = LARGE_OF_HOST, 0, 0


def hosts(count: int) -> list[Any]:
    return [Host() for _ in range(count)]


def test_a_host_may_send_again_what_was_sent_on() -> None:
    arrays, (host,) = PassedArrays(10 * CHUNK_BYTES, 100 * CHUNK_BYTES, CHUNK_BYTES), hosts(1)
    for _ in range(11):
        arrays.take(host, CHUNK_BYTES)
    arrays.sent(host, 3 * CHUNK_BYTES)
    assert host.large_allowed == 13 * CHUNK_BYTES
    for _ in range(3):
        arrays.take(host, CHUNK_BYTES)
    with pytest.raises(UntrustedReport, match=f"{12 * CHUNK_BYTES} bytes of large arrays wait"):
        arrays.take(host, CHUNK_BYTES)


def test_when_much_of_all_hosts_waits_each_may_send_little() -> None:
    arrays, (first, second, third) = PassedArrays(10 * CHUNK_BYTES, 16 * CHUNK_BYTES, 2 * CHUNK_BYTES), hosts(3)
    for host in (first, second):
        for _ in range(8):
            arrays.take(host, CHUNK_BYTES)
    # A host is told before it is held to it.
    arrays.sent(second, CHUNK_BYTES)
    assert second.large_allowed == 3 * CHUNK_BYTES
    arrays.take(third, CHUNK_BYTES)
    arrays.take(third, CHUNK_BYTES)
    arrays.take(third, CHUNK_BYTES)
    with pytest.raises(UntrustedReport):
        arrays.take(third, CHUNK_BYTES)
    for _ in range(7):
        arrays.sent(second, CHUNK_BYTES)
    arrays.sent(first, CHUNK_BYTES)
    assert first.large_allowed == 3 * CHUNK_BYTES
    arrays.sent(first, 3 * CHUNK_BYTES)
    assert first.large_allowed == 14 * CHUNK_BYTES
