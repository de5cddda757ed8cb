"""Fields that a newer version has, or an older one lacks, and what a message costs in bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.support.messages import EVENTS
from tracewire_bus.wire.codec import decode_deltas, decode_event, decode_submission, encode
from tracewire_bus.wire.messages import Append, DecodedOutput, Delete, Delta, RawOutput, Set, Submission
from tracewire_bus.wire.packing import wire


def test_fields_of_a_newer_version_are_ignored() -> None:
    for event in EVENTS:
        body = msgspec.msgpack.decode(encode(event))
        body += [{"nested": [1, 2]}, msgspec.msgpack.Ext(9, b"")]
        assert decode_event(msgspec.msgpack.encode(body)) == event
    delta = [*msgspec.msgpack.decode(encode(Delete(path=("x",)))), "newer"]
    assert decode_deltas(msgspec.msgpack.encode([[delta]])) == [[Delete(path=("x",))]]
    submission = Submission(trace="t", model="m", invokes=[])
    more = {**msgspec.msgpack.decode(encode(submission)), "colour": {"nested": [1, 2]}}
    assert decode_submission(msgspec.msgpack.encode(more)) == submission


def test_fields_that_an_older_version_did_not_have_are_at_their_defaults() -> None:
    """An event is an array: what it lacks at its end counts as not given."""
    body = msgspec.msgpack.decode(encode(DecodedOutput(attempt=1, seq=4, token_ids=[7], text="x")))
    older = decode_event(msgspec.msgpack.encode(body[:-3]))
    assert older == DecodedOutput(attempt=1, seq=4, token_ids=[7], text="x")


@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_an_array_a_token_costs_few_bytes_besides(tokens: int) -> None:
    """All outputs of a trace that saves 512 bytes a token take at most 1.15 of these bytes, however long it is."""
    item = wire(np.zeros(128, np.float32))
    taken = 0
    for index in range(tokens):
        step: list[Delta] = [Append(path=("kept",), items=[item]) if index else Set(path=("kept",), value=[item])]
        output = RawOutput(
            attempt=1,
            seq=index + 1,
            index=index,
            token_ids=[100_000],
            text=" words",
            time=1.7e9,
            deltas=[msgspec.Raw(msgspec.msgpack.encode(step))],
            finish_reason="length" if index == tokens - 1 else None,
        )
        taken += len(encode(output))
    assert taken <= 1.15 * 512 * tokens
