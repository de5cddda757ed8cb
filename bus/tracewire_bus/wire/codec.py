"""Messages to bytes and back.

Encoders and decoders are built once, on first use. A message that cannot be decoded is told from one that this version
does not know: readers skip the second (`UnknownKind`) and report the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, overload

import msgspec

from .messages import (
    SCHEMA,
    Accepted,
    Change,
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
    Snapshot,
    Submission,
)
from .packing import decoder

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
    "schema_text",
]

#: What stands on a trace's stream.
AnyEvent: TypeAlias = Accepted | DecodedOutput | DecodedShared | Notice | Final

_SCHEMA_TEXT = f"{SCHEMA[0]}.{SCHEMA[1]}"
_O = TypeVar("_O", bound=OutputBase)
_S = TypeVar("_S", bound=OutputBase)
#: The tags of what this version knows.
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(AnyEvent))


class UnknownKind(ValueError):
    """An event of a kind that this version does not know (`kind`). Readers skip it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(f"unknown kind of event {kind!r}")


class NewerSchema(ValueError):
    """A message of a schema that this version cannot read."""


class _Peek(msgspec.Struct, array_like=True):
    """Just enough of an event to see what kind it is."""

    kind: str


@cache
def _encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder()


@cache
def _decode(type_: Any) -> Callable[[bytes | memoryview], Any]:
    if isinstance(type_, tuple):
        # An event whose outputs, and those of the trace, are of these forms.
        output, shared = type_
        type_ = Union[Accepted, output, shared, Notice, Final]  # noqa: UP007  (variables)
    return decoder(type_)


@cache
def _plain(type_: Any) -> Callable[[bytes | memoryview], Any]:
    return decoder(type_, plain=True)


@cache
def _deltas() -> Callable[[bytes | memoryview], Any]:
    # Apart: the type takes long to hash.
    return _decode(list[list[Delta]])


def encode(message: Message) -> bytes:
    """`message` in msgpack. Values in it must have been prepared by `wire`."""
    return _encoder().encode(message)


@overload
def decode_event(data: bytes | memoryview) -> AnyEvent: ...


@overload
def decode_event(
    data: bytes | memoryview, output: type[_O], shared: type[_S]
) -> Accepted | _O | _S | Notice | Final: ...


def decode_event(
    data: bytes | memoryview, output: type[OutputBase] = DecodedOutput, shared: type[OutputBase] = DecodedShared
) -> Any:
    """One event of a trace; an output as an `output`, one of the trace itself as a `shared`.

    Arrays in it share memory with `data`.

    Raises:
        UnknownKind: a well-formed event of a kind that a newer version wrote.
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    event = _event(_decode((output, shared)), data)
    if type(event) is Final:
        for _, _, deltas in event.deltas:
            _check_paths(deltas)
    return event


def decode_plain(data: bytes | memoryview) -> AnyEvent:
    """Like `decode_event`, but what msgpack has no type for stays encoded: for who will encode it again.

    Raises:
        UnknownKind: a well-formed event of a kind that a newer version wrote.
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack.
    """
    return cast(AnyEvent, _event(_plain(AnyEvent), data))


def _event(decode: Callable[[bytes | memoryview], Any], data: bytes | memoryview) -> Any:
    try:
        return decode(data)
    except msgspec.ValidationError:
        try:
            kind = _decode(_Peek)(data).kind
        except msgspec.MsgspecError:
            kind = None
        if kind is None or kind in _KINDS:
            raise
        raise UnknownKind(kind) from None


def decode_deltas(data: bytes | memoryview | msgspec.Raw) -> list[list[Delta]]:
    """The deltas of an output by step, from their place in its encoded form. Arrays in them share memory with `data`.

    Raises:
        msgspec.ValidationError: they are none.
        msgspec.DecodeError: they hold a malformed value.
    """
    steps = cast(list[list[Delta]], _deltas()(data))
    for step in steps:
        _check_paths(step)
    return steps


def _check_paths(deltas: list[Delta]) -> None:
    for delta in deltas:
        if not delta.path:
            raise msgspec.DecodeError("a delta has no path")
        try:
            hash(delta.path)
        except TypeError:
            raise msgspec.DecodeError("a delta's path has a step that is no key") from None


def decode_change(data: bytes | memoryview) -> Change:
    """A change of live parameters. Arrays in it share memory with `data`.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(Change, _decode(Change)(data))


def decode_snapshot(data: bytes | memoryview, *, plain: bool = False) -> Snapshot:
    """A snapshot. Arrays in it share memory with `data`; with `plain` they stay encoded.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(Snapshot, (_plain(Snapshot) if plain else _decode(Snapshot))(data))


def decode_submission(data: bytes | memoryview) -> Submission:
    """A submission.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(Submission, _decode(Submission)(data))


def decode_edit(data: bytes | memoryview) -> Edit:
    """A standing intervention.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(Edit, _decode(Edit)(data))


def decode_edit_record(data: bytes | memoryview) -> EditRecord:
    """What an edit left. Arrays in it share memory with `data`.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(EditRecord, _decode(EditRecord)(data))


def decode_engine(data: bytes | memoryview) -> EngineInfo:
    """What an engine said of itself in the registry.

    Raises:
        msgspec.ValidationError: its fields have other types than they should.
        msgspec.DecodeError: it is no msgpack, or holds a malformed value.
    """
    return cast(EngineInfo, _decode(EngineInfo)(data))


def schema_text() -> str:
    """The schema this version writes, as it stands on an entry: `"major.minor"`."""
    return _SCHEMA_TEXT


def check_schema(text: str) -> None:
    """Refuse what this version cannot read. A newer minor version can be read: what it added is ignored.

    Raises:
        NewerSchema: its major version is newer, or `text` is no version.
    """
    if text == _SCHEMA_TEXT:
        return
    major, dot, minor = text.partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()) or len(text) > 20:
        raise NewerSchema(f"a message of schema {text[:40]!r}; this version reads {schema_text()}")
    if int(major) > SCHEMA[0]:
        raise NewerSchema(f"a message of schema {text}; this version reads {schema_text()} and older: update it")


def digest_bytes(data: bytes | memoryview) -> bytes:
    """16 bytes that identify `data`: the digest of raw bytes, not of a value."""
    return hashlib.blake2b(data, digest_size=16).digest()
