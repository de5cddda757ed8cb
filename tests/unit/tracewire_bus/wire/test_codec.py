"""Messages: what is encoded is decoded, across versions, and bad bytes are told apart from new kinds."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equality import equal
from tests.support.messages import EVENTS
from tracewire_bus.wire.codec import (
    AnyEvent,
    NewerSchema,
    UnknownKind,
    check_schema,
    decode_deltas,
    decode_engine,
    decode_event,
    decode_submission,
    digest_bytes,
    encode,
    schema_text,
    schema_version,
)
from tracewire_bus.wire.messages import (
    Append,
    Block,
    DecodedOutput,
    Delete,
    EngineInfo,
    Helper,
    Invoke,
    ModuleInfo,
    RawOutput,
    Set,
    Submission,
    Versions,
)
from tracewire_bus.wire.packing import pack, wire


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_arrive_as_they_were(event: Any) -> None:
    assert decode_event(encode(event)) == event
    assert decode_event(memoryview(encode(event))) == event


def test_one_of_every_event_is_among_them() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(AnyEvent))


def test_a_submission_arrives_as_it_was() -> None:
    submission = Submission(
        trace="t",
        model="m",
        invokes=[
            Invoke(prompt="a", sampling={"max_tokens": 3}),
            Invoke(token_ids=[1]),
            Invoke(messages=[{"role": "u"}]),
        ],
        block=Block(
            name="watch",
            source="x = 1",
            variables=pack({"a": np.ones(3)}),
            helpers=[Helper(name="f", source="def f(): pass")],
            modules={"np": "numpy"},
            imports={"Tensor": ("torch", "Tensor")},
        ),
        live=pack({"alpha": 0.5}),
        deadline_s=3.5,
        detach=True,
        context={"traceparent": "00"},
    )
    assert decode_submission(encode(submission)) == submission


def test_an_engine_arrives_as_it_was() -> None:
    info = EngineInfo(
        engine="e",
        model="m",
        modules=[ModuleInfo("", "Llama"), ModuleInfo("model", "LlamaModel")],
        attributes={"Llama": ["config"]},
        versions=Versions(vllm="0.32.0"),
    )
    assert decode_engine(encode(info)) == info


def test_values_in_deltas_arrive() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    big: dict[Any, Any] = {"t": (1, 2.5), 3: 2**70, None: [array]}
    output = DecodedOutput(
        attempt=1,
        seq=1,
        token_ids=[1],
        deltas=[
            [
                Set(path=("d",), value=wire(big)),
                Append(path=("xs", 0, True, None, b"k", 1.5), items=[wire(array), wire((array,))]),
                Delete(path=("d", 3)),
            ]
        ],
    )
    arrived = decode_event(encode(output))
    assert isinstance(arrived, DecodedOutput)
    set_, append, delete = arrived.deltas[0]
    assert isinstance(set_, Set)
    assert isinstance(append, Append)
    assert equal(set_.value, big)
    assert equal(append.items, [array, (array,)])
    assert append.path == ("xs", 0, True, None, b"k", 1.5)
    assert delete == Delete(path=("d", 3))


def test_steps_encoded_beforehand_read_like_any_others() -> None:
    deltas = [[Set(path=("x",), value=1)], []]
    raw = RawOutput(
        attempt=1, seq=1, token_ids=[1, 2], deltas=[msgspec.Raw(msgspec.msgpack.encode(step)) for step in deltas]
    )
    assert decode_event(encode(raw)) == DecodedOutput(attempt=1, seq=1, token_ids=[1, 2], deltas=deltas)


def test_kinds_of_a_newer_version_are_told_apart() -> None:
    data = msgspec.msgpack.encode(["whispered", 1, 4, msgspec.msgpack.Ext(9, b"")])
    with pytest.raises(UnknownKind) as caught:
        decode_event(data)
    assert caught.value.kind == "whispered"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"garbage",
        msgspec.msgpack.encode({"kind": "output", "attempt": 1, "seq": 1}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([5]),
        msgspec.msgpack.encode(["o", 1]),
        msgspec.msgpack.encode(["o", 1, 1, 0, 0, 0, ["x"]]),
        msgspec.msgpack.encode(["final", 1, 1, "vanished"]),
    ],
)
def test_bad_events_raise_msgspecs_errors(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(data)


def test_a_malformed_value_in_an_event_is_a_decode_error() -> None:
    for value, said in (
        (msgspec.msgpack.Ext(1, b"\xff\xff"), "truncated"),
        (msgspec.msgpack.Ext(99, b""), "malformed value"),
    ):
        step = [["s", ["x"], value]]
        output = RawOutput(attempt=1, seq=1, token_ids=[1], deltas=[msgspec.Raw(msgspec.msgpack.encode(step))])
        with pytest.raises(msgspec.DecodeError, match=said):
            decode_event(encode(output))
        with pytest.raises(msgspec.DecodeError, match=said):
            decode_deltas(msgspec.msgpack.encode([step]))


def test_values_nested_without_end_are_a_decode_error() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    data = encode(
        RawOutput(
            attempt=1,
            seq=1,
            token_ids=[1],
            deltas=[msgspec.Raw(b"\x91\x93\xa1s\x91\xa1x" + deep)],
        )
    )
    with pytest.raises(msgspec.DecodeError, match="too deep"):
        decode_event(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_arbitrary_bytes_raise_nothing_but_value_errors(data: bytes) -> None:
    for decode in (decode_event, decode_submission, decode_engine):
        try:
            decode(data)
        except ValueError:
            pass


def test_schemas() -> None:
    for readable in ("1.0", "2.9", "0.3", schema_text()):
        check_schema(readable)
    for newer in ("3.0", "10.0"):
        with pytest.raises(NewerSchema, match="update it"):
            check_schema(newer)
    for nothing in ("", "1", "1.", "x.y", "1.0.0", "-1.0", "1.0 ", "\N{SUPERSCRIPT TWO}.0", "9" * 5000 + ".0"):
        with pytest.raises(NewerSchema):
            check_schema(nothing)


def test_digest_of_bytes() -> None:
    assert len(digest_bytes(b"")) == 16
    assert digest_bytes(b"a") == digest_bytes(memoryview(b"a")) != digest_bytes(b"b")


def test_a_schema_s_numbers() -> None:
    assert schema_version("2.10") == (2, 10)
    assert [schema_version(text) for text in ("", "2", "2.", "2.x", "2.1.0", "\u00b2.1", "9" * 30 + ".1")] == [None] * 7
