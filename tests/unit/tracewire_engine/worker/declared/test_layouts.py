"""Which bytes of a step belong to which read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from tracewire_bus.wire.messages import Hold, Probe
from tracewire_engine.protocol.messages import Part, Read
from tracewire_engine.worker.declared.drafted_rows import Served
from tracewire_engine.worker.declared.groups import Arrangement, Collector
from tracewire_engine.worker.declared.layouts import made_layout
from tracewire_engine.worker.declared.members import Member


class Op:
    """An intervention of which only that matters."""

    def __init__(self, one: Any) -> None:
        self.one = one


def test_a_read_has_its_rows_and_a_controller_one_number() -> None:
    declaration: Any = SimpleNamespace(request="r", choice=1, reads=True)
    rows: Any = SimpleNamespace(counts=[3], owners=None)

    def collector(one: Any) -> Collector:
        member = Member(declaration, cast(Any, Op(one)), (0, 3))
        return Collector([member], rows, one, 1, False, 0)

    found = [
        (collector(Probe("p", "", positions="all")), {"": torch.zeros(3, 2)}),
        (collector(Hold("s", "", None, "p", 0.0, 0.0, 1.0)), {"": torch.zeros(1)}),
    ]
    layout = made_layout(7, [Served(declaration, 0, 4, since=10)], Arrangement(found))
    (entry,) = layout.entries
    assert (layout.id, entry.request, entry.choice, entry.index) == (7, "r", 1, -6)
    assert layout.sets == [
        [Read("p", [Part("", "float32", (2,), 8, 0, 8)], flat=False)],
        [Read("s", [Part("", "float32", (), 4, 24, 4)])],
    ]
    assert entry.rows == [(0, 0, 3), (1, 0, 1)]
    # The prompt is not computed to its end.
    assert not made_layout(8, [Served(declaration, 0, -1)], Arrangement(found)).entries


def test_a_drafted_request_has_an_entry_for_each_token_that_it_got() -> None:
    """Two requests, of whose three rows two and one count. The reads of a row lie side by side."""
    both: list[Any] = [SimpleNamespace(request=name, choice=0, reads=True) for name in "ab"]
    served = [Served(both[0], 13, 6, drafts=2, taken=1), Served(both[1], 9, 3, drafts=2)]

    def collector(one: Any) -> Collector:
        op = cast(Any, Op(one))
        spans = [(each, row, place * 3 + row) for place, each in enumerate(both) for row in range(3)]
        members = [Member(each, op, (start, 1), draft=row) for each, row, start in spans]
        found = Collector(members, cast(Any, SimpleNamespace(counts=[1] * 6, owners=None)), one, 1, False, 0)
        found.found[0] = torch.arange(6.0)
        found.keep([one.draft <= (1 if one.declaration is both[0] else 0) for one in members])
        return found

    results = [(one, one.results(lambda _: None) or {}) for one in (collector(Probe(name, "")) for name in "pq")]
    arrangement = Arrangement(results)
    layout = made_layout(7, served, arrangement)
    assert [(one.request, one.index) for one in layout.entries] == [("a", 6), ("a", 7), ("b", 3)]
    assert [[row for _, row, _ in one.rows] for one in layout.entries] == [[0, 0], [1, 1], [2, 2]]
    assert [[(one.name, one.parts[0].offset, one.parts[0].stride) for one in reads] for reads in layout.sets] == [
        [("p", 0, 8)],
        [("q", 4, 8)],
    ]
    assert arrangement.join().view(torch.float32).tolist() == [0, 0, 1, 1, 3, 3]


def test_reads_with_the_same_rows_are_one_set_and_names_of_their_own_are_told_apart() -> None:
    """Two requests read two layers each, and call the second one differently."""
    both: list[Any] = [SimpleNamespace(request=name, choice=0, reads=True) for name in "ab"]
    ops = [[cast(Any, Op(Probe(name, ""))) for name in names] for names in (("p", "q"), ("p", "r"))]
    rows: Any = SimpleNamespace(counts=[1, 1], owners=((id(both[0]), 0), (id(both[1]), 0)))
    results = []
    for place in range(2):
        members = [Member(each, own[place], (row, 1)) for row, (each, own) in enumerate(zip(both, ops, strict=True))]
        found = Collector(members, rows, members[0].op.one, 1, False, place)
        results.append((found, {"": torch.zeros(2)}))
    shared = Collector(results[0][0].members, rows, Probe("p", ""), 1, False, 2)
    results.append((shared, {"": torch.zeros(2)}))
    layout = made_layout(7, [Served(one, 0, 3) for one in both], Arrangement(results))
    assert [[read.name for read in reads] for reads in layout.sets] == [["p", "p"], ["q"], ["r"]]
    assert [one.rows for one in layout.entries] == [[(0, 0, 1), (1, 0, 1)], [(0, 1, 1), (2, 1, 1)]]
    assert [(one.offset, one.stride) for reads in layout.sets for read in reads for one in read.parts] == [
        (0, 12),
        (8, 12),
        (4, 12),
        (4, 12),
    ]
