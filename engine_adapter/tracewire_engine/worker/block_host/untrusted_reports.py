"""Checks what a host reports, before the adapter is told: the host may be in the hands of a hostile block.

The adapter takes a worker's word. A record that it cannot read would cost the trace an error that says nothing of the
block, and a flood of messages would keep the worker's process busy, in which the model runs.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.wire.kinds import MAX_DEPTH
from tracewire_bus.wire.messages import PathKey
from tracewire_engine.protocol.block_host import Broken, Chunk, Ready, Report, Reported, Saved
from tracewire_engine.protocol.messages import FinishRecord, StepRecord

__all__ = ["DEEPEST", "UntrustedReport", "UntrustedReports", "values_in"]


class UntrustedReport(ValueError):
    """A host has reported what no host reports that runs its own code."""


#: How many changes of saves a message may have, to the worker and to the relay, and how many keys the path of one. The
#: thread that decodes them does nothing else meanwhile, and in the worker's process the model's thread waits for it.
_CHANGES, _CHANGES_RELAYED, _KEYS = 1 << 16, 1 << 18, 128

#: The path of a save, which begins with its name.
_Path: TypeAlias = Annotated[tuple[PathKey, ...], Meta(min_length=1, max_length=_KEYS)]


class _Append(msgspec.Struct, array_like=True, tag="a"):
    path: _Path
    items: msgspec.Raw


class _Set(msgspec.Struct, array_like=True, tag="s"):
    path: _Path
    value: msgspec.Raw


class _Delete(msgspec.Struct, array_like=True, tag="d"):
    path: _Path


_Delta: TypeAlias = _Append | _Set | _Delete

#: By how many changes they take at most.
_deltas = {
    most: msgspec.msgpack.Decoder(Annotated[list[_Delta], Meta(max_length=most)])
    for most in (_CHANGES, _CHANGES_RELAYED)
}
_encode = msgspec.msgpack.Encoder().encode

#: How many bytes msgpack has before the content of bytes, and of an extension type, by their first byte.
_CONTENT = {0xC4: 2, 0xC5: 3, 0xC6: 5, 0xC7: 3, 0xC8: 4, 0xC9: 6}

#: How many heads of deltas are remembered, and of how many bytes each at most.
_HEADS, _LONGEST_HEAD = 64, 1024

_BLOB = re.compile("[0-9a-f]{16}")

#: How many pieces of large arrays may be small beyond what their sizes explain.
_SPARE = 64

#: The longest text of a message that is logged, or becomes an error.
_TEXT, _TEXTS = 10_000, 32

#: How a record may say that a block has ended its request.
_ENDS = ("", "stop", "error")

#: How many arrays and maps of msgpack may be in each other: several for each container of a save. The adapter and the
#: clients can decode as many, in however deep a stack of calls.
DEEPEST: Final = 4 * MAX_DEPTH

#: How many values a message may have in all, long lists of numbers left out, and how many names.
_VALUES_AT_ONCE, _NAMES_AT_ONCE = 1 << 22, 1 << 16

#: From how many items on a list is looked at as a whole.
_FEW = 16

#: By the first byte of a value of msgpack: how many bytes say its size, how many follow beside that, and whether its
#: size is of bytes (1), of the items of an array (2) or of the pairs of a map (3).
_SIZED = (
    {0xC4: (1, 0, 1), 0xC5: (2, 0, 1), 0xC6: (4, 0, 1), 0xC7: (1, 1, 1), 0xC8: (2, 1, 1), 0xC9: (4, 1, 1)}
    | {0xD9: (1, 0, 1), 0xDA: (2, 0, 1), 0xDB: (4, 0, 1), 0xDC: (2, 0, 2), 0xDD: (4, 0, 2)}
    | {0xDE: (2, 0, 3), 0xDF: (4, 0, 3)}
)
#: The same of values of a fixed size: how many bytes follow.
_FIXED = {0xCA: 4, 0xCB: 8} | {first + power: 1 << power for first in (0xCC, 0xD0) for power in range(4)}
_FIXED |= {0xD4 + power: 1 + (1 << power) for power in range(5)}


def values_in(data: memoryview, deepest: int, most: int = _VALUES_AT_ONCE) -> int:
    """How many values of msgpack are in each other and beside each other in a whole one. Counts one more than `most`.

    A decoder that calls itself for each array and map in another one would raise an error that depends on the stack of
    its caller.

    Raises:
        UntrustedReport: more than `deepest` arrays and maps are in each other.
    """
    left, place, found = [1], 0, 0
    while left and found <= most:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        found += 1
        first = data[place]
        place += 1
        items = -1
        if 0x80 <= first < 0xA0:
            items = first & 15 if first >= 0x90 else 2 * (first & 15)
        elif 0xA0 <= first < 0xC0:
            place += first & 31
        elif (sized := _SIZED.get(first)) is not None:
            width, beside, of = sized
            size = int.from_bytes(data[place : place + width], "big")
            place += width + beside
            if of == 1:
                place += size
            else:
                items = size if of == 2 else 2 * size
        else:
            place += _FIXED.get(first, 0)
        if items >= 0:
            if len(left) > deepest:
                raise UntrustedReport(f"values with more than {deepest} containers in each other")
            if items > _FEW and data[place : place + 9 * items : 9] == b"\xcb" * items:
                # Numbers alone, as most long lists have.
                place, items = place + 9 * items, 0
            left.append(items)
    return found


class UntrustedReports:
    """Checks what one host sends over one of its connections, in the order in which it comes.

    Args:
        large: the size above which an array is large, in bytes. All pieces of one but the last have `CHUNK_BYTES`.
    """

    def __init__(self, large: int) -> None:
        self._least = min(large or CHUNK_BYTES, CHUNK_BYTES) // 2
        self._reported = self._chunks = self._bytes = 0
        #: How many changes of saves the message under way has, and how many values, as far as they had to be looked at.
        self._changes = self._values = 0
        self._ready = False
        #: How many ends of requests the host was told of. It may report each by itself.
        self.ends = 0
        #: Deltas that append one array, up to the array's content, by their size. They were checked, and others with
        #: the same head differ in that content alone.
        self._heads: dict[int, bytes] = {}

    def check(self, report: Report, turns: int) -> None:
        """Check a report.

        Args:
            report: of the host.
            turns: how many turns the worker has sent it.

        Raises:
            UntrustedReport, msgspec.DecodeError, UnicodeDecodeError, RecursionError: no host reports so.
        """
        if isinstance(report, Reported):
            self._changes = self._values = 0
            self._reported += 1
            if self._reported > turns + self.ends:
                raise UntrustedReport(f"{self._reported} reports of {turns} turns and {self.ends} ends")
            self._check_steps(report.steps, _CHANGES)
            self._check_deltas([finish.deltas for finish in report.finishes], _CHANGES)
            _check_names(report.finishes)
        elif isinstance(report, Chunk):
            self._check_chunk(report)
        elif isinstance(report, Ready):
            if self._ready or len(report.missing) > _TEXTS or any(len(one) > _TEXT for one in report.missing):
                raise UntrustedReport("a second message that it is ready, or a long one")
            self._ready = True
        elif isinstance(report, Broken):
            report.message = report.message[:_TEXT]

    def check_saved(self, saved: Saved, allowed: int) -> None:
        """Check what the relay is sent.

        Args:
            saved: of the host.
            allowed: how many such messages the host may have sent: one for each turn, and for each end of a request.

        Raises:
            UntrustedReport, msgspec.DecodeError, UnicodeDecodeError, RecursionError: no host sends so.
        """
        self._changes = self._values = 0
        self._reported += 1
        if self._reported > allowed:
            raise UntrustedReport(f"{self._reported} messages of saves, where {allowed} were allowed")
        self._check_steps(saved.steps, _CHANGES_RELAYED)

    def _check_steps(self, steps: list[StepRecord], most: int) -> None:
        for step in steps:
            if not 0 <= step.index < 1 << 32 or step.ended not in _ENDS:
                raise UntrustedReport(f"a record of token {step.index} that ended as {step.ended[:20]!r}")
        self._check_deltas([step.deltas for step in steps], most)

    def _check_chunk(self, chunk: Chunk) -> None:
        self._chunks, self._bytes = self._chunks + 1, self._bytes + len(chunk.data)
        if not _BLOB.fullmatch(chunk.blob) or not 0 <= chunk.number < 1 << 32 or len(chunk.data) > CHUNK_BYTES:
            raise UntrustedReport("a piece of a large array with an odd name, number or size")
        if (self._chunks - _SPARE) * self._least > self._bytes:
            raise UntrustedReport(f"{self._chunks} pieces of large arrays of {self._bytes} bytes")

    def _check_deltas(self, found: list[msgspec.Raw], most: int) -> None:
        heads = self._heads
        for raw in found:
            head = heads.get(len(raw))
            if head is None or memoryview(raw)[: len(head)] != head:
                self._learn_head(raw, most)

    def _learn_head(self, raw: msgspec.Raw, most: int) -> None:
        """Check deltas. If others with the same head would differ in an array's content alone, remember the head."""
        deltas = _deltas[most].decode(raw)
        self._changes += len(deltas)
        self._values += values_in(memoryview(raw), DEEPEST)
        if self._changes > most or self._values > _VALUES_AT_ONCE:
            raise UntrustedReport(f"at least {self._changes} changes with {self._values} values in one message")
        for delta in deltas:
            if type(delta) is _Append and not _is_list(memoryview(delta.items)):
                raise UntrustedReport("a change that appends something else than a list")
        data = memoryview(raw)
        head = _head_of(deltas, data)
        # Nothing else limits the path in it.
        if 0 < len(head) <= _LONGEST_HEAD:
            if len(self._heads) >= _HEADS:
                self._heads.clear()
            self._heads[len(data)] = head


def _head_of(deltas: list[_Delta], data: memoryview) -> bytes:
    """The deltas up to the content of the one array that they append; empty if they do anything else."""
    if len(deltas) != 1 or type(delta := deltas[0]) is not _Append:
        return b""
    items = memoryview(delta.items)
    before = _CONTENT.get(items[1], 0) if len(items) > 1 and items[0] == 0x91 else 0
    # Other deltas with these items could have more behind them, which the decoder passes over.
    return bytes(data[: len(data) - len(items) + 1 + before]) if before and _encode(deltas) == data else b""


def _check_names(finishes: list[FinishRecord]) -> None:
    """Check what else ends of requests have, and cut what is only text."""
    names = 0
    for finish in finishes:
        names += len(finish.manifest) + len(finish.save_errors) + len(finish.edit_errors)
        finish.hosted = True
        finish.warnings = [one[:_TEXT] for one in finish.warnings[:_TEXTS]]
    if names > _NAMES_AT_ONCE:
        raise UntrustedReport(f"{names} names of saves and errors in one report")


def _is_list(raw: memoryview) -> bool:
    return raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)
