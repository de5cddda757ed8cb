"""References in place of an output's deltas."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_bus.wire.bulk_ranges import BulkRange, bulk_digest, bulk_range, encode_bulk_range
from tracewire_bus.wire.codec import decode_deltas, decode_event, encode_deltas, encode_output, find_bulk, with_deltas
from tracewire_bus.wire.messages import Append, DecodedOutput, Final, RawOutput, Restarted
from tracewire_bus.wire.pieces import Pieces

encode = msgspec.msgpack.encode
WHERE = BulkRange("store", "segment", 5, 1 << 40, bytes(range(16)))


def test_a_range_comes_back() -> None:
    assert bulk_range(encode_bulk_range(WHERE)) == WHERE


@pytest.mark.parametrize("count", [0, 1, 15, 16, 65535, 65536])
def test_a_list_is_no_range(count: int) -> None:
    assert bulk_range(encode([[]] * count)) is None
    assert bulk_range(b"") is None


@pytest.mark.parametrize(
    "data",
    [
        encode(msgspec.msgpack.Ext(1, b"array")),
        encode(msgspec.msgpack.Ext(9, b"nothing")),
        encode(msgspec.msgpack.Ext(9, encode(["store", "segment", -1, 1, bytes(16)]))),
        encode(msgspec.msgpack.Ext(9, encode(["store", "segment", 0, -1, bytes(16)]))),
        encode(msgspec.msgpack.Ext(9, encode(["store", "segment", 0, 1, bytes(15)]))),
        encode(msgspec.msgpack.Ext(9, encode([1, "segment", 0, 1, bytes(16)]))),
    ],
)
def test_what_is_no_range_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        bulk_range(data)


def test_an_output_s_deltas_can_lie_elsewhere() -> None:
    steps = [msgspec.Raw(encode([Append(("a",), [number])])) for number in range(3)]
    fields = {
        "attempt": 1,
        "seq": 4,
        "invoke": 0,
        "choice": 2,
        "token_ids": [1, 2, 3],
        "token_strings": ["a", "b", "c"],
    }
    inline = bytes(encode_output(RawOutput(**fields, deltas=steps)))
    deltas = bytes(encode_deltas(steps))
    referring = encode_output(RawOutput(**fields, deltas=encode_bulk_range(WHERE)))
    assert isinstance(referring, bytes)
    assert find_bulk(referring) == WHERE
    assert find_bulk(inline) is None
    whole = decode_event(with_deltas(referring, deltas))
    assert isinstance(whole, DecodedOutput)
    assert whole == decode_event(inline)
    assert whole.deltas == decode_deltas(deltas) == [[Append(("a",), [number])] for number in range(3)]


def test_other_events_lie_on_redis() -> None:
    for event in (Restarted(1, 0, "why"), Final(1, 1, status="finished")):
        assert find_bulk(encode(event)) is None


def test_a_digest_is_of_the_bytes() -> None:
    assert bulk_digest(Pieces([b"ab", memoryview(b"c")])) == bulk_digest(b"abc") != bulk_digest(b"abd")
    assert len(bulk_digest(b"")) == 16
