"""Gathers the interventions of a step's requests into groups that can run together.

Requests whose interventions are of the same kinds are gathered at once: what an intervention needs for its rows is
found once for all of them, and once for all interventions that have the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from tracewire_bus.wire.messages import AttentionPattern, Steer

from .drafted_rows import Served
from .groups import Rows
from .members import Entry, Member, Members, declaration_of
from .ops import Declaration, Kind, Op
from .spans import Chunk, spans_of

__all__ = ["Gathering"]


class _Piece(NamedTuple):
    """Rows of a request in a step: those up to its next token's (`draft` 0), or that of a draft."""

    declaration: Declaration
    chunk: Chunk
    draft: int


#: The first row of each entry, and how many rows it has.
_Spans: TypeAlias = tuple[tuple[int, int], ...]


class _Entries:
    """Rows of one intervention of several requests, which all have one row each, or all have several."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self.entries: list[Entry] = []

    def spans(self) -> _Spans:
        """The rows of each."""
        return tuple([(one.row, 1) if type(one) is Served else one[1] for one in self.entries])  # type: ignore[index]


class _Alike:
    """The members of one group, and their rows in pieces. Groups with the same rows have the same pieces."""

    def __init__(self, step: int) -> None:
        self.members = Members(step)
        self.pieces: list[_Spans] = []


class Gathering:
    """The interventions of a step, by what can share a group.

    Args:
        fail: ends the interventions of members' requests with an error.
        step: the step's number.

    Attributes:
        recordable: whether a CUDA graph can have the groups, as far as is known here.
        steady: whether each step of the plan has the same groups, as far as is known here.
    """

    def __init__(self, fail: Callable[[Iterable[Member], Exception], None], step: int = 0) -> None:
        self.recordable = self.steady = True
        self._fail, self._step = fail, step
        self._found: dict[tuple[Any, ...], _Alike] = {}
        #: Pieces of requests with interventions of the same kind, one after the other in the batch, yet to be gathered.
        self._run: list[Served | _Piece] = []
        self._kind: Kind | None = None
        #: Whether all of them are served as in the step before.
        self._all_lasting = True

    def add(self, declaration: Declaration, chunk: Chunk, draft: int) -> None:
        """Add interventions of a request that does not come before those added so far.

        Those that do not fit the prompt fail. `draft`: the number of the draft whose row the chunk is, from 1 on; or 0.
        """
        self._begin(declaration)
        self._run.append(_Piece(declaration, chunk, draft))
        self._all_lasting = False

    def add_lasting(self, served: Served) -> None:
        """Add interventions like `add`, of a request that is served as in the step before."""
        if served.declaration.kind is not self._kind:
            self._begin(served.declaration)
        self._run.append(served)

    def _begin(self, declaration: Declaration) -> None:
        """Begin another run of requests, if this one does not belong to the last."""
        if declaration.kind is not self._kind:
            self._gather()
            self._kind = declaration.kind

    def groups(self, total: int, device: torch.device) -> Iterator[tuple[Members, Rows]]:
        """The members of each group with their rows, in the order in which groups run. `total`: rows of the step."""
        self._gather()
        by_pieces: dict[tuple[int, ...], Rows] = {}
        by_spans: dict[_Spans, Rows] = {}
        for _, alike in sorted(self._found.items(), key=_in_order):
            pieces = tuple(map(id, alike.pieces))
            rows = by_pieces.get(pieces)
            if rows is None:
                spans = tuple(chain.from_iterable(alike.pieces))
                rows = by_spans.get(spans)
                if rows is None:
                    rows = by_spans[spans] = Rows(spans, total, device)
                    # No two requests have a row in common, so members with the same rows are of the same requests.
                    rows.owners = alike.members.owners()
                by_pieces[pieces] = rows
            yield alike.members, rows

    def _gather(self) -> None:
        """Gather the interventions of the requests of the run."""
        run, self._run = self._run, []
        lasting, self._all_lasting = self._all_lasting, True
        # The rows of interventions, by what these depend on. Each list of rows is one piece of all groups that have it.
        known: dict[tuple[Any, ...], list[tuple[_Entries, _Spans]]] = {}
        together: dict[tuple[Any, ...], tuple[list[Entry], _Spans]] = {}
        ops = run[0].declaration.ops if run else []
        shared = all(one.declaration.ops is ops for one in run)
        for order, op in enumerate(ops):
            by = op.rows_by
            if by is None:
                for piece in run:
                    self._gather_one(order, self._piece(piece))
                continue
            found = known.get(by)
            if found is None:
                found = known[by] = [(one, one.spans()) for one in self._entries(op, run, lasting=lasting)]
            if len(found) > 1 and shared and _is_uniform(op):
                if by not in together:
                    together[by] = _together(found)
                every, all_spans = together[by]
                alike = self._alike(_key(order, op, several=True))
                alike.pieces.append(all_spans)
                alike.members.add(op, order, every)
                continue
            for entries, spans in found:
                if entries.several and not shared:
                    for entry, span in zip(entries.entries, spans, strict=True):
                        own = declaration_of(entry).ops[order]
                        alike = self._alike(_key(order, own, several=True))
                        alike.pieces.append((span,))
                        alike.members.add(own, order, [entry])
                    continue
                alike = self._alike(_key(order, op, several=entries.several))
                alike.pieces.append(spans)
                if shared:
                    alike.members.add(op, order, entries.entries)
                else:
                    alike.members.add_each(order, entries.entries)

    def _piece(self, one: Served | _Piece) -> _Piece:
        if not isinstance(one, Served):
            return one
        if one.since < self._step:
            one.settle(self._step - 1)
        return _Piece(one.declaration, one.chunk(self._step), 0)

    def _entries(self, op: Op, run: list[Served | _Piece], *, lasting: bool) -> list[_Entries]:
        """The rows of an intervention of several requests, those with one row apart from those with several.

        `lasting`: all of them are served as in the step before.
        """
        found: dict[bool, _Entries] = {}
        each_token = op.each_token
        if lasting and each_token:
            # Nothing depends on how far the requests are.
            _entries_of(found, several=False).extend(run)  # type: ignore[arg-type]
            return list(found.values())
        for one in run:
            if type(one) is Served and each_token:
                _entries_of(found, several=False).append(one)
                continue
            declaration, chunk, draft = self._piece(one)
            index = chunk.first - chunk.start - chunk.prompt + 1
            for start, count, at in spans_of(op, declaration, chunk):
                rows = declaration, (start, count), at, index + start, draft
                _entries_of(found, several=count > 1).append(rows)
        return list(found.values())

    def _gather_one(self, order: int, piece: _Piece) -> None:
        """Gather an intervention of one request, whose rows depend on more than its positions."""
        declaration, chunk, draft = piece
        op = declaration.ops[order]
        try:
            members = _members_of(declaration, order, chunk, draft)
        except ValueError as error:
            self._fail([Member(declaration, op, (chunk.start, 0))], error)
            return
        for member in members:
            key = _key(order, op, several=member.span[1] > 1)
            if isinstance(op.one, AttentionPattern):
                key += self._pattern_key(op.one, member)
            alike = self._alike(key)
            alike.pieces.append((member.span,))
            alike.members.add(op, order, [member])

    def _alike(self, key: tuple[Any, ...]) -> _Alike:
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _Alike(self._step)
        return found

    def _pattern_key(self, one: AttentionPattern, member: Member) -> tuple[Any, ...]:
        """What tells groups of attention patterns apart, besides what tells all groups apart."""
        self.recordable = False
        if member.keys:
            return ("keys",)
        if one.top_k:
            return ("single" if member.span[1] == 1 else "several",)
        # A whole pattern is wider in each step, and as wide as its own request is long.
        self.steady = False
        return (id(member.declaration),)


def _in_order(item: tuple[tuple[Any, ...], _Alike]) -> tuple[int, bool]:
    """By the place of the intervention in its list; keys before the queries that need them."""
    (order, *_), alike = item
    return order, not alike.members[0].keys


def _key(order: int, op: Op, *, several: bool) -> tuple[Any, ...]:
    """Equal for interventions that can share a group. `several`: each of them has several rows."""
    if several and not op.rowwise:
        # Vectors are not spread over a prompt's rows: each vector has a group of its own.
        return order, op.grouping, id(op.matrix), id(op.bias), op.numbers
    return order, op.grouping


def _is_uniform(op: Op) -> bool:
    """Whether an intervention does the same with each of its rows, however many a request has of them."""
    return isinstance(op.one, Steer) and op.one.when is None


def _together(found: list[tuple[_Entries, _Spans]]) -> tuple[list[Entry], _Spans]:
    """All of these entries in the order of their rows, and their rows."""
    pairs = [pair for entries, spans in found for pair in zip(spans, entries.entries, strict=True)]
    pairs.sort(key=lambda pair: pair[0])
    return [entry for _, entry in pairs], tuple([span for span, _ in pairs])


def _entries_of(found: dict[bool, _Entries], *, several: bool) -> list[Entry]:
    entries = found.get(several)
    if entries is None:
        entries = found[several] = _Entries(several)
    return entries.entries


def _members_of(declaration: Declaration, place: int, chunk: Chunk, draft: int) -> list[Member]:
    """An intervention's rows in a step.

    Raises:
        ValueError: it does not fit the prompt.
    """
    op, index = declaration.ops[place], chunk.first - chunk.start - chunk.prompt + 1
    members = [
        Member(declaration, op, (start, count), at, place=place, index=index + start, draft=draft)
        for start, count, at in spans_of(op, declaration, chunk)
    ]
    if isinstance(op.one, AttentionPattern):
        if chunk.first > declaration.seen:
            raise ValueError(f"the keys of the positions before {chunk.first} were not computed here")
        # Before the queries, which need them.
        span = chunk.start, chunk.count
        keys = Member(declaration, op, span, chunk.first, place=place, index=index, draft=draft, keys=True)
        members.insert(0, keys)
    return members
