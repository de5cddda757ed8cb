"""The file of a recording: a mark, the version of the form, the length, msgpack, and a checksum of all of it."""

from __future__ import annotations

import os
import tempfile
import zlib
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Final

import msgspec

from tracewire.errors import InvalidRecording
from tracewire_bus.domain.limits import LimitExceeded, measure

__all__ = ["MOST", "VERSION", "Content", "Engine", "parse_content", "read_content", "write_content"]

_MARK: Final = b"\x89TWREC\r\n"
#: The version of the form. Readers refuse later ones.
VERSION: Final = 1
_HEAD: Final = len(_MARK) + 2 + 8
_SUM: Final = 16
#: The most that a file may unpack to, in bytes: 8 GiB.
MOST: Final = 8 * 2**30


class Engine(msgspec.Struct, kw_only=True):
    """The engine that ran the last attempt, as the registry and the trace have it."""

    engine: str = ""
    host: str = ""
    path: str = ""
    revision: str = ""
    dtype: str = ""
    versions: dict[str, str] = {}


class Content(msgspec.Struct, kw_only=True):
    """What a recording holds.

    `submission` is encoded, with all its arrays; `None` if the one who recorded could not read it. `events` are
    encoded, with the schema of each, in order. A gap, of events that were trimmed before, is `("gap SINCE UNTIL",
    schema, snapshot)`. `arrays` has the elements of large arrays by the name of their blob.
    """

    trace: str
    model: str
    made_at: float
    made_by: str = ""
    tracewire: str = ""
    complete: bool = True
    submission: bytes | None = None
    events: list[tuple[str, str, bytes]] = []
    arrays: dict[str, bytes] = {}
    #: Whether large arrays were left out, and stay references.
    references: bool = False
    engine: Engine = msgspec.field(default_factory=Engine)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Content)


def write_content(path: str | PathLike[str], content: Content) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    packed = zlib.compress(_encoder.encode(content), 6)
    head = _MARK + VERSION.to_bytes(2, "big") + len(packed).to_bytes(8, "big")
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in (head, packed, _checksum(head, packed)):
                file.write(part)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def read_content(path: str | PathLike[str]) -> Content:
    """Read a file.

    Raises:
        InvalidRecording: it is none, is of a later version, or is damaged.
        OSError: it cannot be read.
    """
    return parse_content(Path(path).read_bytes(), str(path))


def parse_content(data: bytes, name: str, most: int = MOST, values: int | None = None) -> Content:
    """Read the bytes of a file called `name`, which may unpack to `most` bytes, and to events of `values` values.

    Raises:
        InvalidRecording: it is none, is of a later version, is damaged, or unpacks to more.
    """
    if not data.startswith(_MARK):
        raise InvalidRecording(name, "expected a recording of `tracewire record`, and the file is none")
    version = int.from_bytes(data[len(_MARK) : len(_MARK) + 2], "big")
    if version > VERSION:
        why = f"it has the form {version}, and this version of Tracewire reads up to {VERSION}: install a later one"
        raise InvalidRecording(name, why)
    length = int.from_bytes(data[len(_MARK) + 2 : _HEAD], "big")
    if len(data) != _HEAD + length + _SUM:
        raise InvalidRecording(name, f"it is damaged: expected {_HEAD + length + _SUM} bytes, got {len(data)}")
    head, packed, checksum = data[:_HEAD], data[_HEAD:-_SUM], data[-_SUM:]
    if _checksum(head, packed) != checksum:
        raise InvalidRecording(name, "it is damaged: its checksum differs")
    try:
        unpacker = zlib.decompressobj()
        body = unpacker.decompress(packed, most)
        if not unpacker.eof:
            raise InvalidRecording(name, f"it is damaged, or unpacks to more than {most} bytes")
        return _decoder.decode(body) if values is None else _counted(body, values)
    except LimitExceeded:
        why = f"it has more than {values} values, or its values nest too deep"
        raise InvalidRecording(name, why) from None
    except (zlib.error, msgspec.MsgspecError) as error:
        raise InvalidRecording(name, f"it cannot be read: {error}") from error


def _counted(body: bytes, most: int) -> Content:
    """The content of a file that may have `most` values, each part counted before it is decoded.

    Raises:
        LimitExceeded: it has more.
    """
    left = most - measure(body, "recording", most, most)
    content = _decoder.decode(body)
    for data in (content.submission or b"", *(data for _, _, data in content.events)):
        left -= measure(data, "recording", left, left)
    return content


def _checksum(head: bytes, packed: bytes) -> bytes:
    return blake2b(packed, digest_size=_SUM, key=head).digest()
