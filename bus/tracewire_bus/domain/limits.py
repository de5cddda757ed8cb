"""Limits on a submission, in bytes and in counts. Clients and engines check the same limits.

A small message can decode to many objects: one megabyte of empty lists takes a hundred megabytes of memory. An engine
therefore counts the values of a message before decoding the message (`measure`), and checks the decoded submission
afterwards (`check_submission`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from tracewire_bus.wire.messages import Block, Submission
from tracewire_bus.wire.refs import FROZENSET, SET, TUPLE, ArrayRef

from .intervention_checks import array_fields
from .limit_table import DEFAULTS, LimitExceeded, Limits

__all__ = [
    "MAX_BYTES",
    "MAX_CONTAINERS",
    "MAX_DEPTH",
    "MAX_EDITS",
    "MAX_HELPERS",
    "MAX_INVOKES",
    "MAX_LIVE_VALUES",
    "MAX_SOURCE",
    "MAX_SOURCES",
    "MAX_TRACE_ID",
    "MAX_TUPLES",
    "MAX_VALUES",
    "LimitExceeded",
    "Limits",
    "check_size",
    "check_submission",
    "check_tries",
    "check_vectors",
    "measure",
]

MAX_BYTES: Final = DEFAULTS.submission_bytes
MAX_VALUES: Final = DEFAULTS.values
MAX_CONTAINERS: Final = DEFAULTS.containers
MAX_TUPLES: Final = DEFAULTS.tuple_keys
#: Depth to which containers nest: that of a value (`kinds.MAX_DEPTH`), and of the message around it.
MAX_DEPTH: Final = DEFAULTS.depth
MAX_INVOKES: Final = DEFAULTS.prompts
MAX_HELPERS: Final = DEFAULTS.helpers
MAX_SOURCE: Final = DEFAULTS.source
MAX_SOURCES: Final = DEFAULTS.sources
MAX_EDITS: Final = DEFAULTS.edits
MAX_TRACE_ID: Final = DEFAULTS.trace_id
#: Values in the live parameters of a trace, and in a change of them: each is a name and a number, a text or an array.
MAX_LIVE_VALUES: Final = 16 * DEFAULTS.live


def check_submission(submission: Submission, limits: Limits = DEFAULTS) -> None:
    """Check the counts and numbers of a decoded submission.

    Raises:
        LimitExceeded: a part exceeds its limit, or the deadline or a line number is out of range.
    """
    blocks = [submission.block, *(invoke.block for invoke in submission.invokes)]
    given = [block for block in blocks if block is not None]
    choices = [_choices(invoke.sampling.get("n")) for invoke in submission.invokes]
    for field, what, count, most, limit in [
        ("trace", "characters in its id", len(submission.trace), limits.trace_id, "trace_id"),
        ("invokes", "prompts", len(submission.invokes), limits.prompts, "prompts"),
        ("sampling.n", "choices of a prompt", max(choices, default=0), limits.choices, "choices"),
        ("sampling.n", "choices of all prompts", sum(choices), limits.requests, "requests"),
        ("interventions", "interventions", len(submission.interventions), limits.interventions, "interventions"),
        ("live", "bytes of live parameters", len(submission.live), limits.live * limits.live_bytes, "live_bytes"),
        ("shared", "bytes of shared values", len(submission.shared), limits.shared_bytes, "shared_bytes"),
        ("edits", "edits", max(map(len, [submission.edits or [], *_edits(submission)])), limits.edits, "edits"),
        ("max_attempts", "attempts", submission.max_attempts, limits.attempts, "attempts"),
    ]:
        _check_count(field, what, count, most, limit)
    _check_prompts(submission, limits)
    _check_names(submission, given, limits)
    check_vectors(value for _, _, value in array_fields(submission.interventions) if isinstance(value, ArrayRef))
    _check_sources(given, limits)
    deadline = submission.deadline_s
    if deadline is not None and not 0 <= deadline < math.inf:
        raise LimitExceeded("deadline", f"expected seconds from now, got {deadline}")


def _choices(n: object) -> int:
    """How many choices a prompt asks for. A wrong value counts as one, and vLLM refuses it."""
    return n if type(n) is int and n > 0 else 1


def _check_prompts(submission: Submission, limits: Limits) -> None:
    """Check prompts of token ids, before they are compared with the vocabulary."""
    most = limits.prompt_tokens
    for invoke in submission.invokes if most else ():
        if invoke.token_ids is not None:
            _check_count("prompt", "tokens in a prompt", len(invoke.token_ids), most, "prompt_tokens")


def _check_names(submission: Submission, blocks: Iterable[Block], limits: Limits) -> None:
    """Check the lengths of names, which appear in keys, events and logs."""
    named: list[tuple[str, str]] = [("client", submission.client), ("lease", submission.lease)]
    for block in blocks:
        named.append(("block", block.name))
        named += [("block", name) for name in (*block.parameters, *block.paths, *block.shared)]
        named += [("block", helper.name) for helper in block.helpers]
    for invoke in submission.invokes:
        named.append(("lora", invoke.lora or ""))
        named += [("edits", name) for name in invoke.edits or ()]
    named += [("edits", name) for name in submission.edits or ()]
    for field, name in named:
        _check_count(field, "characters in a name", len(name), limits.name, "name")


def _check_sources(blocks: Iterable[Block], limits: Limits) -> None:
    total = 0
    for block in blocks:
        _check_count("block", "helpers of one block", len(block.helpers), limits.helpers, "helpers")
        for name, source, first_line in [
            (block.name, block.source, block.first_line),
            *((helper.name, helper.source, helper.first_line) for helper in block.helpers),
        ]:
            total += len(source)
            if len(source) > limits.source:
                message = f"{name[:200]} is longer than {limits.source} characters"
                raise LimitExceeded("block", message, "source")
            if not 0 < first_line <= 1_000_000:
                raise LimitExceeded("block", f"{name[:200]} starts past line 1000000")
    _check_count("block", "characters of source, of all blocks and helpers", total, limits.sources, "sources")


def check_vectors(refs: Iterable[ArrayRef]) -> None:
    """Check the sizes of the arrays to which a submission's interventions refer.

    Raises:
        LimitExceeded: they are larger together than a submission may be.
    """
    size = sum(ref.nbytes for ref in refs)
    _check_count("interventions", "bytes of arrays in interventions", size, DEFAULTS.vector_bytes, "vector_bytes")


def _edits(submission: Submission) -> list[list[str]]:
    return [invoke.edits or [] for invoke in submission.invokes]


def _check_count(field: str, what: str, count: int, most: int, limit: str) -> None:
    if count > most:
        raise LimitExceeded(field, f"a submission has at most {most} {what}, got {count}", limit)


def check_tries(tries: int, limits: Limits = DEFAULTS) -> None:
    """Check how many engines may still be lost over a queue entry, whatever its submission says.

    Raises:
        LimitExceeded: more than `limits.attempts`.
    """
    _check_count("max_attempts", "attempts", tries, limits.attempts, "attempts")


def check_size(nbytes: int, limits: Limits = DEFAULTS) -> None:
    """Check the size in bytes of an encoded submission.

    Raises:
        LimitExceeded: the size exceeds `limits.submission_bytes`.
    """
    most = limits.submission_bytes
    if nbytes > most:
        raise LimitExceeded(
            "submission",
            f"the submission takes {nbytes} bytes, and may take {most}; large values travel beside it when they "
            "are arrays",
            "submission_bytes",
        )


#: Values with a length field, by their first byte: the bytes of the length field, and what the length counts: 0 bytes,
#: 1 values (in maps: pairs), 2 bytes of an extension, whose type follows the length field.
_WITH_LENGTH: Final[dict[int, tuple[int, int]]] = {
    **dict.fromkeys((0xC4, 0xD9), (1, 0)),
    **dict.fromkeys((0xC5, 0xDA), (2, 0)),
    **dict.fromkeys((0xC6, 0xDB), (4, 0)),
    **dict.fromkeys((0xDC, 0xDE), (2, 1)),
    **dict.fromkeys((0xDD, 0xDF), (4, 1)),
    0xC7: (1, 2),
    0xC8: (2, 2),
    0xC9: (4, 2),
}
#: Values of fixed size, by their first byte: the number of bytes that follow, including an extension's type.
_FIXED_SIZES: Final[dict[int, int]] = {
    **dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True)),
    **dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)),
}


#: Types of the extensions that contain values: tuples, sets and frozen sets.
_CONTAINER_EXTENSIONS: Final = frozenset((TUPLE, SET, FROZENSET))
_SET_EXTENSIONS: Final = frozenset((SET, FROZENSET))


def measure(data: bytes | memoryview, field: str, most: int = MAX_VALUES, most_containers: int = MAX_CONTAINERS) -> int:
    """Count the values in encoded data without decoding the data.

    The time depends on the number of values, not on their size. Data that is cut short is not an error here, but raises
    when it is decoded.

    Args:
        data: a message or a packed value.
        field: the part of the submission that `data` is, for the error.
        most: the limit on the number of values.
        most_containers: the limit on the number of lists, dicts and arrays among them.

    Returns:
        the number of values, including keys and containers.

    Raises:
        LimitExceeded: `data` has more values, containers, or tuples as keys than allowed, or nests too deep.
    """
    counter = _Counter(field, most, most_containers)
    counter.count(memoryview(data), 0, False)
    return counter.values


class _Counter:
    """Counts values, containers, and tuples that are keys, and raises when a count exceeds its limit."""

    def __init__(self, field: str, most: int, most_containers: int) -> None:
        self._field = field
        self._most = most
        self._most_containers = most_containers
        self.values = self._containers = self._tuples = 0

    def count(self, data: memoryview, depth: int, of_set: bool) -> None:
        """Count the values in `data`, which is at depth `depth`. `of_set`: `data` is the list of a set's items."""
        end, at = len(data), 0
        # A stack of the open containers: the values still to come of each, and whether the container is a map.
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
            elif first in _WITH_LENGTH:
                width, kind = _WITH_LENGTH[first]
                count = int.from_bytes(data[at : at + width], "big")
                at += width
                if kind == 1:
                    inside = 2 * count if first >= 0xDE else count
                else:
                    at += self._extension(data, at, count, depth + len(left)) if kind == 2 else count
            elif 0xD4 <= first <= 0xD8:
                at += self._extension(data, at, _FIXED_SIZES[first] - 1, depth + len(left))
            else:
                at += _FIXED_SIZES.get(first, 0)
            if inside >= 0:
                self._containers += 1
                if self.values + inside > self._most:
                    self.values += inside
                is_map = 0x80 <= first < 0x90 or first >= 0xDE
                # Hashes of tuples of numbers are predictable: with many colliding keys, a dict takes quadratic time.
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
                or self._containers > self._most_containers
                or self._tuples > MAX_TUPLES
                or depth + len(left) > MAX_DEPTH
            ):
                raise LimitExceeded(
                    self._field,
                    f"more than {self._most} values, {self._most_containers} lists, dicts and arrays or {MAX_TUPLES} "
                    f"keys that are tuples, or nested deeper than {MAX_DEPTH}; pass many numbers as one array",
                    self._reached(depth + len(left)),
                )

    def _reached(self, depth: int) -> str:
        """The name of the limit that is exceeded."""
        if depth > MAX_DEPTH:
            return "depth"
        if self._containers > self._most_containers:
            return "containers"
        return "tuple_keys" if self._tuples > MAX_TUPLES else "values"

    def _extension(self, data: memoryview, at: int, size: int, depth: int) -> int:
        """Count the values in an extension whose type is at `at`. Returns its bytes, including the type."""
        self._containers += 1
        code = data[at] if at < len(data) else 0
        if code in _CONTAINER_EXTENSIONS and depth <= MAX_DEPTH:
            self.count(data[at + 1 : at + 1 + size], depth + 1, code in _SET_EXTENSIONS)
        return size + 1
