"""Encodes messages to msgpack and decodes them.

Encoders and decoders are built once, on first use. An event of a kind that only newer versions know raises
`UnknownKind`, which readers skip. A malformed message raises an error of msgspec, which readers report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, overload

import msgspec

from .bulk_ranges import BulkRange, bulk_range
from .columns import layout_of
from .messages import (
    REQUEST_SCHEMA,
    SCHEMA,
    Accepted,
    Change,
    Columns,
    DecodedOutput,
    DecodedShared,
    Delta,
    Edit,
    EditRecord,
    EngineInfo,
    Final,
    Message,
    Notice,
    OutputBase,
    RawOutput,
    Snapshot,
    Submission,
)
from .packing import Decode, decoder
from .pieces import LARGE_BYTES, Pieces, flatten
from .refs import Loader

__all__ = [
    "AnyEvent",
    "NewerSchema",
    "UnknownKind",
    "check_schema",
    "decode_change",
    "decode_deltas",
    "decode_edit",
    "decode_edit_record",
    "decode_engine",
    "decode_event",
    "decode_plain",
    "decode_snapshot",
    "decode_submission",
    "digest_bytes",
    "encode",
    "encode_deltas",
    "encode_output",
    "encoded_size",
    "extend_encoded_list",
    "find_bulk",
    "list_head",
    "request_schema_text",
    "schema_text",
    "schema_version",
    "with_deltas",
]

#: Every kind of event that a trace's stream can hold.
AnyEvent: TypeAlias = Accepted | DecodedOutput | DecodedShared | Notice | Final

_SCHEMA_TEXT = f"{SCHEMA[0]}.{SCHEMA[1]}"
_OutputT = TypeVar("_OutputT", bound=OutputBase)
_SharedT = TypeVar("_SharedT", bound=OutputBase)
#: The tags of the events that this version knows.
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(AnyEvent))


class UnknownKind(ValueError):
    """A well-formed event of a kind that this version does not know. Readers skip the event.

    Attributes:
        kind: the event's tag.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"unknown kind of event {kind!r}")


class NewerSchema(ValueError):
    """A message was written with a schema that this version cannot read."""


class _Tag(msgspec.Struct, array_like=True):
    """Decodes an event's tag alone."""

    kind: str


@cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_joined)


def _joined(value: Any) -> msgspec.Raw:
    """The bytes of `Pieces`, which are encoded already."""
    if type(value) is not Pieces:
        raise TypeError(f"a {type(value).__name__} cannot be encoded")
    return msgspec.Raw(bytes(value))


@cache
def _decoder(type_: Any) -> Decode:
    return decoder(type_)


@cache
def _event_decoder(output: type[OutputBase], shared: type[OutputBase]) -> Decode:
    return decoder(Union[Accepted, output, shared, Notice, Final])  # noqa: UP007  (variables)


@cache
def _plain_decoder(type_: Any) -> Decode:
    return decoder(type_, plain=True)


@cache
def _deltas_decoder() -> Decode:
    # Cached under no argument: the type is slow to hash.
    return decoder(list[list[Delta]])


def encode(message: Message) -> bytes:
    """Encode a message in msgpack. The caller must have prepared the values in the message with `packing.wire`."""
    return _encoder().encode(message)


def encode_output(output: RawOutput) -> bytes | Pieces:
    """Encode an output. Large deltas are not copied: with these, the result is `Pieces`."""
    steps = output.deltas
    if isinstance(steps, msgspec.Raw) or encoded_size(steps) < LARGE_BYTES:
        return encode(output)
    output.deltas = []
    without = encode(output)
    output.deltas = steps
    # The deltas are the last field but two. An empty list is one byte.
    tail = _encoder().encode(output.token_strings) + _encoder().encode(output.message)
    return Pieces([without[: -len(tail) - 1], *encode_deltas(steps).buffers, tail])


def encode_deltas(steps: Sequence[msgspec.Raw | Pieces]) -> Pieces:
    """The encoded `deltas` of an output, of the encoded deltas of its steps."""
    head = b"\xdd" + len(steps).to_bytes(4, "big")
    return Pieces([head, *flatten([step if isinstance(step, Pieces) else memoryview(step) for step in steps])])


def encoded_size(steps: Sequence[msgspec.Raw | Pieces]) -> int:
    """The size of the encoded deltas of steps, in bytes."""
    return sum(map(_size, steps))


def _size(step: msgspec.Raw | Pieces) -> int:
    return len(step) if type(step) is Pieces else memoryview(step).nbytes  # type: ignore[arg-type]


class _Undecoded(OutputBase, tag="o"):
    """An output with its deltas as they arrived."""

    deltas: msgspec.Raw = msgspec.Raw(b"\x90")  # type: ignore[assignment]
    token_strings: list[str] | None = None


def find_bulk(data: bytes | memoryview) -> BulkRange | None:
    """The range of an encoded event's deltas, if it is an output whose deltas are in a bulk store.

    Raises:
        msgspec.MsgspecError: `data` is no event, or the reference is malformed.
    """
    return bulk_range(_decoder(_Undecoded)(data).deltas) if _decoder(_Tag)(data).kind == "o" else None


def with_deltas(data: bytes | memoryview, deltas: bytes) -> bytes:
    """An encoded output with these encoded deltas in place of its own.

    Raises:
        msgspec.MsgspecError: `data` is no output.
    """
    output: _Undecoded = _decoder(_Undecoded)(data)
    output.deltas = msgspec.Raw(deltas)
    return _encoder().encode(output)


def extend_encoded_list(raw: bytes | memoryview, more: bytes | memoryview) -> Pieces:
    """An encoded list, with the items of another encoded list at its end."""
    count, start = _list_start(raw)
    added, start_of_more = _list_start(more)
    return Pieces([list_head(count + added), memoryview(raw)[start:], memoryview(more)[start_of_more:]])


def list_head(count: int) -> bytes:
    """The bytes before the items of an encoded list of `count` items."""
    return bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")


def _list_start(raw: bytes | memoryview) -> tuple[int, int]:
    """The number of items of an encoded list, and where the first of them begins."""
    first = raw[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(raw[1:3], "big"), 3
    return int.from_bytes(raw[1:5], "big"), 5


@overload
def decode_event(data: bytes | memoryview) -> AnyEvent: ...


@overload
def decode_event(
    data: bytes | memoryview, output: type[_OutputT], shared: type[_SharedT], loader: Loader | None = None
) -> Accepted | _OutputT | _SharedT | Notice | Final: ...


def decode_event(
    data: bytes | memoryview,
    output: type[OutputBase] = DecodedOutput,
    shared: type[OutputBase] = DecodedShared,
    loader: Loader | None = None,
) -> Any:
    """Decode one event of a trace. Arrays in the event share memory with `data`.

    Args:
        data: the encoded event.
        output: the class to decode an output of a choice as.
        shared: the class to decode an output of the trace's shared values as.
        loader: loads the large arrays to which the event refers.

    Raises:
        UnknownKind: the event is well-formed, and of a kind that only newer versions know.
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    event = _decode_event(_event_decoder(output, shared), data, loader)
    if type(event) is Final:
        for _, _, deltas in event.deltas:
            _check_paths(deltas)
    return event


def decode_plain(data: bytes | memoryview) -> AnyEvent:
    """Decode one event of a trace, leaving msgpack extensions (arrays, tuples, sets, ...) as `msgspec.msgpack.Ext`.

    For callers that encode the event's values again: they need not decode and re-encode large arrays.

    Raises:
        UnknownKind: the event is well-formed, and of a kind that only newer versions know.
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack.
    """
    return cast(AnyEvent, _decode_event(_plain_decoder(AnyEvent), data))


def _decode_event(decode: Decode, data: bytes | memoryview, loader: Loader | None = None) -> Any:
    try:
        return decode(data, loader)
    except msgspec.ValidationError:
        try:
            kind = _decoder(_Tag)(data).kind
        except msgspec.MsgspecError:
            kind = None
        if kind is None or kind in _KINDS:
            raise
        raise UnknownKind(kind) from None


def decode_deltas(data: bytes | memoryview | msgspec.Raw, loader: Loader | None = None) -> list[list[Delta]]:
    """Decode an output's `deltas` field: one list of deltas a step. Arrays in them share memory with `data`.

    `loader` loads the large arrays to which they refer.

    Raises:
        msgspec.ValidationError: `data` encodes something other than lists of deltas.
        msgspec.DecodeError: `data` is not msgpack, a delta has no valid path, or a value in it is malformed.
    """
    steps = cast(list[list[Delta]], _deltas_decoder()(data, loader))
    for step in steps:
        _check_paths(step)
    return steps


def _check_paths(deltas: list[Delta]) -> None:
    for delta in deltas:
        if isinstance(delta, Columns):
            _check_columns(delta)
            continue
        if not delta.path:
            raise msgspec.DecodeError("a delta has no path")
        try:
            hash(delta.path)
        except TypeError:
            raise msgspec.DecodeError("a delta's path has a step that cannot be a key") from None


def _check_columns(delta: Columns) -> None:
    try:
        wanted = layout_of(delta.layout).nbytes
    except ValueError as error:
        raise msgspec.DecodeError(f"a record of columns has no layout: {error}") from None
    if len(delta.values) != wanted:
        raise msgspec.DecodeError(f"a record of columns takes {wanted} bytes, got {len(delta.values)}")


def decode_change(data: bytes | memoryview) -> Change:
    """Decode a change of live parameters. Arrays in it share memory with `data`.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(Change, _decoder(Change)(data))


def decode_snapshot(data: bytes | memoryview, *, plain: bool = False, loader: Loader | None = None) -> Snapshot:
    """Decode a snapshot of a trace's folded state. Arrays in it share memory with `data`.

    `loader` loads the large arrays to which it refers.

    With `plain`, msgpack extensions (arrays, tuples, sets, ...) stay encoded, as `msgspec.msgpack.Ext`.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(Snapshot, (_plain_decoder(Snapshot) if plain else _decoder(Snapshot))(data, loader))


def decode_submission(data: bytes | memoryview) -> Submission:
    """Decode a submission.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(Submission, _decoder(Submission)(data))


def decode_edit(data: bytes | memoryview) -> Edit:
    """Decode a standing intervention.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(Edit, _decoder(Edit)(data))


def decode_edit_record(data: bytes | memoryview) -> EditRecord:
    """Decode the record of an edit's saves on one request. Its `deltas` stay encoded: see `decode_deltas`.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(EditRecord, _decoder(EditRecord)(data))


def decode_engine(data: bytes | memoryview) -> EngineInfo:
    """Decode an engine's entry in the registry.

    Raises:
        msgspec.ValidationError: a field has a wrong type.
        msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
    """
    return cast(EngineInfo, _decoder(EngineInfo)(data))


def schema_text() -> str:
    """The schema that this version writes, as the text `"major.minor"` of a stream entry's schema field."""
    return _SCHEMA_TEXT


def request_schema_text() -> str:
    """The schema of the submissions and edits that this version writes, as the text `"major.minor"`."""
    return f"{REQUEST_SCHEMA[0]}.{REQUEST_SCHEMA[1]}"


def schema_version(text: str) -> tuple[int, int] | None:
    """The major and the minor number of a schema, given as `"major.minor"`; None if it is none."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()) or len(text) > 20:
        return None
    return int(major), int(minor)


@lru_cache(maxsize=64)
def check_schema(text: str, known: tuple[int, int] = SCHEMA) -> None:
    """Check that this version can read messages of a schema, given as `"major.minor"`.

    `known` is the schema that this version writes for such messages: `REQUEST_SCHEMA` for submissions and edits.
    A newer minor version only adds fields and kinds, which this version ignores.

    Raises:
        NewerSchema: the major version is newer than this version's, or `text` is not a version.
    """
    version = schema_version(text)
    if version is None:
        raise NewerSchema(f"a message of schema {text[:40]!r}; this version reads {known[0]}.{known[1]}")
    if version[0] > known[0]:
        raise NewerSchema(f"a message of schema {text}; this version reads {known[0]}.{known[1]} and older: update it")


def digest_bytes(data: bytes | memoryview) -> bytes:
    """The 16-byte BLAKE2b digest of raw bytes. For the digest of a value, see `digests.digest`."""
    return hashlib.blake2b(data, digest_size=16).digest()
