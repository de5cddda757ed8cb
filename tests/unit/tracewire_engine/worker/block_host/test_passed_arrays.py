"""How many bytes of hosts' large arrays may wait in the worker."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_engine.link.blob_receiver import BlobChunk
from tracewire_engine.protocol.block_host import LARGE_OF_HOST
from tracewire_engine.protocol.messages import Report, StepRecord
from tracewire_engine.worker.block_host.passed_arrays import HostArrays, PassedArrays, PassedMessage
from tracewire_engine.worker.block_host.untrusted_reports import UntrustedReport

PIECE = bytes(CHUNK_BYTES)


def hosts(count: int) -> list[HostArrays]:
    made = [HostArrays() for _ in range(count)]
    for one in made:
        one.told = 0
    return made


def come(arrays: PassedArrays, host: HostArrays, count: int) -> list[PassedMessage]:
    return [arrays.take(host, BlobChunk("r", "ab" * 8, number), PIECE) for number in range(count)]


def test_a_host_may_send_again_what_was_sent_on() -> None:
    arrays, (host,) = PassedArrays(10 * CHUNK_BYTES, 100 * CHUNK_BYTES, CHUNK_BYTES), hosts(1)
    assert arrays.allow(host) == 10 * CHUNK_BYTES
    messages = come(arrays, host, 10)
    assert [message.send() for message in messages[:3]] == [PIECE] * 3
    assert arrays.allow(host) == 13 * CHUNK_BYTES
    come(arrays, host, 3)
    # One piece may be more than the rest of what it is allowed.
    come(arrays, host, 1)
    with pytest.raises(UntrustedReport, match=f"{15 * CHUNK_BYTES} bytes of large arrays, where {13 * CHUNK_BYTES}"):
        come(arrays, host, 1)


def test_a_host_is_held_to_what_it_was_told_and_not_to_what_others_have_sent_since() -> None:
    arrays, (first, second, third) = PassedArrays(10 * CHUNK_BYTES, 16 * CHUNK_BYTES, CHUNK_BYTES), hosts(3)
    assert [arrays.allow(one) for one in (first, second, third)] == [10 * CHUNK_BYTES] * 3
    for host in (first, second):
        come(arrays, host, 7)
    waits = first.waiting + second.waiting
    assert arrays.allow(third) == 16 * CHUNK_BYTES - waits
    come(arrays, third, 2)
    assert arrays.too_many((first, second, third)) is not None


def test_what_a_host_may_send_grows_again_when_others_are_sent() -> None:
    arrays, (first, second) = PassedArrays(10 * CHUNK_BYTES, 10 * CHUNK_BYTES, CHUNK_BYTES), hosts(2)
    arrays.allow(first)
    messages = come(arrays, first, 10)
    assert arrays.allow(second) == CHUNK_BYTES
    for message in messages:
        message.send()
    assert arrays.allow(second) == 10 * CHUNK_BYTES


def test_if_too_much_waits_it_is_the_host_of_which_the_most_does() -> None:
    arrays, (first, second) = PassedArrays(LARGE_OF_HOST, 4 * CHUNK_BYTES, CHUNK_BYTES), hosts(2)
    for host in (first, second):
        host.told = LARGE_OF_HOST
    large = come(arrays, first, 3)
    assert arrays.too_many((first, second)) is None
    come(arrays, second, 1)
    assert arrays.too_many((first, second)) is first
    assert arrays.too_many((second,)) is second
    arrays.drop(first)
    assert (first.waiting, arrays.too_many((first, second))) == (0, None)
    assert [message.send() for message in large] == [None] * 3


def test_reports_behind_large_arrays_count_and_lose_their_saves_if_they_are_dropped() -> None:
    arrays, (host,) = PassedArrays(LARGE_OF_HOST, CHUNK_BYTES, CHUNK_BYTES), hosts(1)
    deltas = msgspec.Raw(msgspec.msgpack.encode([PIECE]))
    report = Report(steps=[StepRecord("r", 0, 0, deltas)])
    message = arrays.take(host, report)
    assert arrays.too_many((host,)) is host
    arrays.drop(host)
    assert message.send() == b""
    assert bytes(report.steps[0].deltas) == msgspec.msgpack.encode([])
    assert arrays.too_many((host,)) is None
