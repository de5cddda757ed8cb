"""Which bytes of a plan's steps belong to which read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tracewire_engine.protocol.messages import Layout, LayoutEntry, Part, Read
from tracewire_engine.worker.host_copy import TORCH_DTYPES

from .drafted_rows import Served
from .groups import Arrangement, Collector, ReadPart
from .ops import Op

__all__ = ["made_layout"]


class _Set(NamedTuple):
    """Reads of the same rows: whose these are (the `owners` of a `Collector`), the first of each, and how many."""

    reads: list[Read]
    owners: Sequence[tuple[int, int]]
    firsts: Sequence[int]
    counts: Sequence[int]


class _Sets:
    """The sets of reads of a layout."""

    def __init__(self) -> None:
        self.sets: list[_Set] = []
        #: The sets of all members of collectors, by what these have in common.
        self._known: dict[tuple[int, bool], _Set] = {}

    def add(self, collector: Collector, places: Sequence[ReadPart]) -> None:
        """Add what a collector reads."""
        flat = collector.each_one or getattr(collector.one, "positions", "last") == "last"
        parts = [
            Part(one.key, TORCH_DTYPES[one.values.dtype], tuple(one.values.shape[1:]), one.size, one.offset, one.stride)
            for one in places
        ]
        names = dict.fromkeys([_name(op) for op in collector.distinct_ops()])
        if len(names) > 1:
            # These requests call it differently.
            for name, rows in _by_name(collector).items():
                self.sets.append(_Set([Read(name, parts, flat)], *map(list, zip(*rows, strict=True))))
            return
        # Most collectors are of the same requests.
        alike = id(collector.owners), collector.each_one
        found = self._known.get(alike)
        if found is None:
            found = self._known[alike] = _Set([], collector.owners, _firsts(collector), collector.counts)
            self.sets.append(found)
        found.reads.extend([Read(name, parts, flat) for name in names])

    def rows(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """By owner, what a `LayoutEntry` has as `rows`."""
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for place, (_, owners, firsts, counts) in enumerate(self.sets):
            for owner, first, count in zip(owners, firsts, counts, strict=True):
                found.setdefault(owner, []).append((place, first, count))
        return found


def _firsts(collector: Collector) -> list[int]:
    """The first row of each member."""
    return list(accumulate(collector.counts, initial=0))[:-1]


def _by_name(collector: Collector) -> dict[str, list[tuple[tuple[int, int], int, int]]]:
    """By the name of what they read, the members: whose, the first row, and how many rows."""
    found: dict[str, list[tuple[tuple[int, int], int, int]]] = {}
    rows = zip(collector.owners, _firsts(collector), collector.counts, strict=True)
    for member, row in zip(collector.members, rows, strict=True):
        found.setdefault(_name(member.op), []).append(row)
    return found


def _name(op: Op) -> str:
    return str(getattr(op.one, "name", ""))


def made_layout(number: int, declarations: Sequence[Served], arrangement: Arrangement) -> Layout:
    """The layout of a plan's reads. A request has an entry for each token that it has got by the plan's first step.

    Args:
        number: the layout's id.
        declarations: of the plan.
        arrangement: the place of each row of the reads.
    """
    found = _Sets()
    for collector, places in arrangement.places:
        found.add(collector, places)
    sets = [one.reads for one in found.sets]
    # A negative index: the prompt is not computed to its end, and the step samples no token.
    reading = [one for one in declarations if one.index >= 0 and one.declaration.reads]
    owners = tuple([one.owner for one in reading])
    if len(found.sets) == 1 and found.sets[0].owners == owners and found.sets[0].counts == [1] * len(owners):
        # As a rule, all requests read alike, and each has a row.
        return Layout(number, sets, [_entry(one, 0, [(0, row, 1)]) for row, one in enumerate(reading)])
    rows = found.rows()
    drafted = [(one, draft) for one in reading for draft in range(one.taken + 1)]
    return Layout(number, sets, [_entry(one, draft, rows.get((one.owner[0], draft), [])) for one, draft in drafted])


def _entry(one: Served, draft: int, rows: list[tuple[int, int, int]]) -> LayoutEntry:
    declaration = one.declaration
    return LayoutEntry(declaration.request, declaration.choice, one.index - one.since + draft, rows)
