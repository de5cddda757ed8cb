"""The members of groups: an intervention of a request each, with its rows of the flat batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import msgspec

from .drafted_rows import Served
from .ops import Declaration, Op

__all__ = ["Entry", "Member", "Members", "declaration_of"]


class Member(msgspec.Struct, eq=False):
    """An intervention with its rows in this composition of the batch: the first of them, and how many.

    Attributes:
        at: the place of the first of them among all rows of the intervention, which an intervention with a vector for
            each row needs. Where the intervention reads, the first row's position in the sequence.
        place: the intervention's place in its trace's list.
        index: of the token that the model samples from its first row, in the plan's first step.
        draft: the number of the draft whose row it has, from 1 on; 0 if its rows are no draft's.
        keys: whether its rows are those whose keys are kept for an attention pattern, and are not read.
    """

    declaration: Declaration
    op: Op
    span: tuple[int, int]
    at: int = 0
    place: int = 0
    index: int = 0
    draft: int = 0
    keys: bool = False


Entry: TypeAlias = Served | tuple[Declaration, tuple[int, int], int, int, int] | Member
"""A member of several interventions that have the same rows: its declaration, `span`, `at`, `index` and `draft`."""


class Members(Sequence[Member]):
    """The members of a group, in order, which are made when they are looked at. `step` is the step's number."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._parts: list[tuple[Op, int, Sequence[Entry]]] = []
        self._count = 0
        self._first: Member | None = None
        self._made: list[Member] | None = None

    def add(self, op: Op, place: int, entries: Sequence[Entry]) -> None:
        """Add members that have an intervention in common, which is at this place in the lists of their traces."""
        self._parts.append((op, place, entries))
        self._count += len(entries)
        self._made = None

    def add_each(self, place: int, entries: Sequence[Entry]) -> None:
        """Add members that each have an intervention at this place in the list of their trace."""
        every = [declaration_of(one).ops[place] for one in entries]
        start = 0
        for end in range(1, len(every) + 1):
            if end == len(every) or every[end] is not every[start]:
                self.add(every[start], place, entries[start:end])
                start = end

    def ops(self) -> list[Op]:
        """The intervention of each."""
        return [op for own, _, entries in self._parts for op in [own] * len(entries)]

    def distinct_ops(self) -> list[Op]:
        """The interventions that any of them has."""
        return list(dict.fromkeys([op for op, _, _ in self._parts]))

    def owners(self) -> tuple[tuple[int, int], ...]:
        """The request (the `id` of its declared interventions) and draft of each."""
        every = [entry for _, _, entries in self._parts for entry in entries]
        return tuple([_owner(entry) for entry in every])

    def _all(self) -> list[Member]:
        if self._made is None:
            self._made = [
                _member(op, place, entry, self._step) for op, place, entries in self._parts for entry in entries
            ]
        return self._made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        if index == 0 and self._made is None:
            # Most groups look at their first member only.
            if self._first is None:
                op, place, entries = self._parts[0]
                self._first = _member(op, place, entries[0], self._step)
            return self._first
        return self._all()[index]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all())


def declaration_of(entry: Entry) -> Declaration:
    """The declared interventions of a member's request."""
    return entry[0] if isinstance(entry, tuple) else entry.declaration


def _member(op: Op, place: int, entry: Entry, step: int) -> Member:
    if isinstance(entry, Member):
        return entry
    if isinstance(entry, Served):
        return Member(entry.declaration, op, (entry.row, 1), entry.position_in(step), place, entry.index_in(step))
    declaration, span, at, index, draft = entry
    return Member(declaration, op, span, at, place, index, draft)


def _owner(entry: Entry) -> tuple[int, int]:
    if isinstance(entry, Served):
        return entry.owner
    return id(declaration_of(entry)), entry.draft if isinstance(entry, Member) else entry[4]
