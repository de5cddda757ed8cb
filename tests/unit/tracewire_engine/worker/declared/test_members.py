"""The members of a group, made when they are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tracewire_engine.worker.declared.drafted_rows import Served
from tracewire_engine.worker.declared.members import Entry, Member, Members

DECLARATIONS: list[Any] = [SimpleNamespace(name=name) for name in "abc"]


class Op:
    """An intervention."""


def entries() -> list[Entry]:
    """A request that was served likewise for two steps, a drafted row, and a member."""
    first, second, third = DECLARATIONS
    served = Served(first, 13, 4, row=7, since=38, lasting=True)
    return [served, (second, (9, 2), 5, 1, 3), Member(third, cast(Any, None), (11, 1), 6, 2, 1)]


def test_members_are_what_their_entries_say_in_the_step() -> None:
    op: Any = Op()
    members = Members(40)
    members.add(op, 1, entries())
    assert [(one.span, one.at, one.place, one.index, one.draft) for one in members] == [
        ((7, 1), 14, 1, 6, 0),
        ((9, 2), 5, 1, 1, 3),
        ((11, 1), 6, 2, 1, 0),
    ]
    assert [one.declaration for one in members] == DECLARATIONS
    assert members[0].op is op
    assert members.owners() == ((id(DECLARATIONS[0]), 0), (id(DECLARATIONS[1]), 3), (id(DECLARATIONS[2]), 0))


def test_interventions_in_common_are_told_once() -> None:
    first: Any = Op()
    second: Any = Op()
    members = Members(40)
    members.add(first, 0, entries())
    assert members[0].op is first
    members.add(second, 0, entries()[:1])
    members.add(first, 0, entries()[1:2])
    assert len(members) == len(list(members)) == 5
    assert members.ops() == [first, first, first, second, first]
    assert members.distinct_ops() == [first, second]
    assert [one.op for one in members[3:]] == [second, first]
    with pytest.raises(IndexError):
        members[5]


def test_members_may_have_interventions_of_their_own() -> None:
    """Neighbours with the same one are told together."""
    first: Any = Op()
    second: Any = Op()
    own = [SimpleNamespace(ops=[None, op]) for op in (first, first, second)]
    every = [Served(cast(Any, one), 13, 4, row=row) for row, one in enumerate(own)]
    members = Members(0)
    members.add_each(1, every)
    assert members.ops() == [first, first, second]
    assert [count for _, _, count in members._parts] == [every[:2], every[2:]]
    assert [(one.op, one.place, one.span) for one in members] == [
        (first, 1, (0, 1)),
        (first, 1, (1, 1)),
        (second, 1, (2, 1)),
    ]
