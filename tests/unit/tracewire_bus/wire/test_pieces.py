"""Bytes in several buffers are the same bytes."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_bus.wire.codec import decode_event, encode, encode_output, extend_encoded_list, list_head
from tracewire_bus.wire.columns import Column, ColumnPart, encode_layout
from tracewire_bus.wire.messages import Columns, DecodedOutput, RawOutput
from tracewire_bus.wire.pieces import LARGE_BYTES, Pieces, flatten

DELTAS = msgspec.msgpack.encode


def test_pieces_are_their_bytes() -> None:
    buffer = bytearray(b"cd")
    pieces = Pieces([b"ab", b"", memoryview(buffer)])
    assert (len(pieces), bytes(pieces), pieces) == (4, b"abcd", b"abcd")
    assert b"abcd" == pieces  # noqa: SIM300
    assert pieces == Pieces([b"abc", b"d"])
    assert pieces != b"abce"
    assert flatten([b"x", pieces]) == [b"x", b"ab", memoryview(buffer)]


@pytest.mark.parametrize("before", [0, 3, 15, 16, 70_000])
@pytest.mark.parametrize("more", [0, 1, 20, 70_000])
def test_a_list_is_extended_without_being_decoded(before: int, more: int) -> None:
    found = extend_encoded_list(DELTAS(list(range(before))), DELTAS(["x"] * more))
    assert msgspec.msgpack.decode(bytes(found)) == [*range(before), *["x"] * more]
    assert bytes(found).startswith(list_head(before + more))


@pytest.mark.parametrize("size", [10, LARGE_BYTES, 10 * LARGE_BYTES])
@pytest.mark.parametrize("strings", [None, ["a", "b"]])
def test_an_output_in_pieces_is_the_output(size: int, strings: list[str] | None) -> None:
    """Its large buffers are not copied, and the event is as it was."""
    values = b"v" * size
    layout = encode_layout([Column("a", (ColumnPart("", "uint8", (size,)),))])
    step = Pieces([b"\x91\x93\xa1c" + DELTAS(layout) + b"\xc6" + size.to_bytes(4, "big"), values])
    output = RawOutput(1, 2, index=5, token_ids=[7, 8], text="ab", time=1.5, token_strings=strings)
    output.deltas = [step, msgspec.Raw(b"\x90")]
    found = encode_output(output)
    assert output.deltas == [step, msgspec.Raw(b"\x90")]
    assert isinstance(found, Pieces) == (size >= LARGE_BYTES)
    if isinstance(found, Pieces):
        assert any(buffer is values for buffer in found.buffers)
    assert msgspec.msgpack.decode(bytes(found)) == msgspec.msgpack.decode(encode(output))
    other = msgspec.structs.replace(output, deltas=[msgspec.Raw(b"\x90")] * 2)
    assert bytes(encode_output(other)) == encode(other)
    event = decode_event(bytes(found))
    assert isinstance(event, DecodedOutput)
    assert event.deltas == [[Columns(layout, memoryview(values))], []]
    assert event.token_strings == strings


def test_nothing_else_is_encoded_in_their_place() -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode(RawOutput(1, 0, deltas=[object()]))  # type: ignore[list-item]
