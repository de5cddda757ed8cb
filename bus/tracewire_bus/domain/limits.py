"""What one submission may be, in bytes and in counts: the same for a client, which sends it, and an engine.

A few bytes can decode to many objects: a megabyte of empty lists takes a hundred. So an engine looks at how much there
is in a message before it decodes the message (`measure`), and at what is in it
afterwards (`check_submission`).
"""

from __future__ import annotations

import math
from typing import Final

from tracewire_bus.wire.live_values import MAX_BYTES as MAX_LIVE_BYTES
from tracewire_bus.wire.live_values import MAX_NAMES as MAX_LIVE
from tracewire_bus.wire.messages import Submission

from .intervention_checks import MAX_INTERVENTIONS

__all__ = [
    "MAX_BYTES",
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_EDITS",
    "MAX_HELPERS",
    "MAX_INVOKES",
    "MAX_SOURCE",
    "MAX_SOURCES",
    "MAX_TRACE_ID",
    "MAX_TUPLES",
    "MAX_VALUES",
    "LimitExceeded",
    "check_size",
    "check_submission",
    "measure",
]

#: How many bytes a submission takes at most, encoded. Large arrays are not part of it: they travel beside it.
MAX_BYTES: Final = 32 * 1024 * 1024
#: How many values are in it, or in one packed field of it: numbers, texts, keys; and how many lists, dicts and arrays.
MAX_VALUES: Final = 500_000
MAX_CONTAINERS: Final = 30_000
#: How many tuples are keys of dicts, or items of sets.
MAX_TUPLES: Final = 1024
#: How deep they nest: what a value may, and the message around it.
MAX_DEPTH: Final = 80
MAX_INVOKES: Final = 1024
#: How many helpers one block has.
MAX_HELPERS: Final = 256
#: How many characters the source of one block or helper has, and those of all together.
MAX_SOURCE: Final = 100_000
MAX_SOURCES: Final = 1_000_000
#: How many standing interventions one invoke asks for.
MAX_EDITS: Final = 64
#: How many characters a trace's id has.
MAX_TRACE_ID: Final = 256


class LimitExceeded(ValueError):
    """A submission is more than one may be. `field` says which part of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def check_submission(submission: Submission) -> None:
    """Refuse a submission that has more of something than it may have, or a number that cannot be.

    Raises:
        LimitExceeded: naming the field and its limit.
    """
    blocks = [submission.block, *(invoke.block for invoke in submission.invokes)]
    given = [block for block in blocks if block is not None]
    for field, what, count, most in [
        ("trace", "characters in its id", len(submission.trace), MAX_TRACE_ID),
        ("invokes", "prompts", len(submission.invokes), MAX_INVOKES),
        ("block", "helpers of one block", max((len(one.helpers) for one in given), default=0), MAX_HELPERS),
        ("interventions", "interventions", len(submission.interventions), MAX_INTERVENTIONS),
        ("live", "bytes of live parameters", len(submission.live), MAX_LIVE * MAX_LIVE_BYTES),
        ("edits", "edits", max(map(len, [submission.edits or [], *_edits(submission)])), MAX_EDITS),
    ]:
        _bound(field, what, count, most)
    total = 0
    for block in given:
        for name, source, first_line in [
            (block.name, block.source, block.first_line),
            *((helper.name, helper.source, helper.first_line) for helper in block.helpers),
        ]:
            total += len(source)
            if len(source) > MAX_SOURCE or not 0 < first_line <= 1_000_000:
                raise LimitExceeded(
                    "block", f"{name[:200]} is longer than {MAX_SOURCE} characters, or starts past line 1000000"
                )
    _bound("block", "characters of source, of all blocks and helpers", total, MAX_SOURCES)
    deadline = submission.deadline_s
    if deadline is not None and not 0 <= deadline < math.inf:
        raise LimitExceeded("deadline", f"expected seconds from now, got {deadline}")


def _edits(submission: Submission) -> list[list[str]]:
    return [invoke.edits or [] for invoke in submission.invokes]


def _bound(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise LimitExceeded(field, f"a submission has at most {most} {what}, got {count}")


def check_size(nbytes: int) -> None:
    """Refuse a submission that is too large, encoded.

    Raises:
        LimitExceeded: it is.
    """
    if nbytes > MAX_BYTES:
        raise LimitExceeded(
            "submission",
            f"it takes {nbytes} bytes, and may take {MAX_BYTES}; large values travel beside it when they are arrays",
        )


#: By the first byte of an encoded value: how many bytes say how much follows, and what follows: 0 bytes, 1 values (in
#: maps: pairs), 2 an extension's type and bytes.
_FORMS: Final[dict[int, tuple[int, int]]] = {
    **dict.fromkeys((0xC4, 0xD9), (1, 0)),
    **dict.fromkeys((0xC5, 0xDA), (2, 0)),
    **dict.fromkeys((0xC6, 0xDB), (4, 0)),
    **dict.fromkeys((0xDC, 0xDE), (2, 1)),
    **dict.fromkeys((0xDD, 0xDF), (4, 1)),
    0xC7: (1, 2),
    0xC8: (2, 2),
    0xC9: (4, 2),
}
#: By the first byte of all others: how many bytes follow, an extension's type among them.
_SIZES: Final[dict[int, int]] = {
    **dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)),
}


#: Extensions that hold values: a tuple, a set, a frozen set.
_OF_VALUES: Final = frozenset((2, 6, 7))
_SETS: Final = frozenset((6, 7))


def measure(data: bytes | memoryview, field: str, most: int = MAX_VALUES) -> int:
    """Look through encoded data without decoding it. It says nothing of data that is cut short: decoding does.

    Looking takes time with the number of values, of which there may be `most`, and not with their bytes. Returns it.

    Raises:
        LimitExceeded: of `field`; it holds too many values, containers, or keys that are tuples, or nests too deep.
    """
    found = _Measure(field, most)
    found.look(memoryview(data), 0, False)
    return found.values


class _Measure:
    def __init__(self, field: str, most: int) -> None:
        self._field = field
        self._most = most
        self.values = self._containers = self._tuples = 0

    def look(self, data: memoryview, depth: int, of_set: bool) -> None:
        """Count what stands in `data`, which stands `depth` deep; `of_set` where a set's items do."""
        end, at = len(data), 0
        #: Of each container around: how many values are left in it, and whether it is a map.
        left: list[int] = []
        maps: list[bool] = []
        while at < end:
            first = data[at]
            at += 1
            self.values += 1
            inside = -1
            if first < 0x80 or first >= 0xE0:
                pass
            elif first < 0x90:
                inside = 2 * (first & 0x0F)
            elif first < 0xA0:
                inside = first & 0x0F
            elif first < 0xC0:
                at += first & 0x1F
            elif first in _FORMS:
                width, kind = _FORMS[first]
                count = int.from_bytes(data[at : at + width], "big")
                at += width
                if kind == 1:
                    inside = 2 * count if first >= 0xDE else count
                else:
                    at += self._extension(data, at, count, depth + len(left)) if kind == 2 else count
            elif 0xD4 <= first <= 0xD8:
                at += self._extension(data, at, _SIZES[first] - 1, depth + len(left))
            else:
                at += _SIZES.get(first, 0)
            if inside >= 0:
                self._containers += 1
                if self.values + inside > self._most:
                    self.values += inside
                is_map = 0x80 <= first < 0x90 or first >= 0xDE
                # Python hashes tuples of numbers in a known way: many can be made to take time that grows as a square.
                is_key = maps[-1] and left[-1] % 2 == 0 if left else False
                self._tuples += not is_map and (is_key or (of_set and len(left) == 1))
                left.append(inside)
                maps.append(is_map)
            elif left:
                left[-1] -= 1
            while left and left[-1] <= 0:
                left.pop()
                maps.pop()
                if left:
                    left[-1] -= 1
            if (
                self.values > self._most
                or self._containers > MAX_CONTAINERS
                or self._tuples > MAX_TUPLES
                or depth + len(left) > MAX_DEPTH
            ):
                raise LimitExceeded(
                    self._field,
                    f"it holds more than {self._most} values, {MAX_CONTAINERS} lists, dicts and arrays or {MAX_TUPLES} "
                    f"keys that are tuples, or they nest deeper than {MAX_DEPTH}; many numbers travel as one array",
                )

    def _extension(self, data: memoryview, at: int, size: int, depth: int) -> int:
        """Look through an extension whose type is at `at`. Returns how many bytes it takes, its type included."""
        self._containers += 1
        code = data[at] if at < len(data) else 0
        if code in _OF_VALUES and depth <= MAX_DEPTH:
            self.look(data[at + 1 : at + 1 + size], depth + 1, code in _SETS)
        return size + 1
