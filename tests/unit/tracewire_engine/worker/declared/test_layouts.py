"""Which bytes of a step belong to which read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from tracewire_bus.wire.messages import Hold, Probe
from tracewire_engine.worker.declared.drafted_rows import Served
from tracewire_engine.worker.declared.groups import Arrangement, Collector, Member
from tracewire_engine.worker.declared.layouts import made_layout


def test_a_read_has_its_rows_and_a_controller_one_number() -> None:
    declaration: Any = SimpleNamespace(request="r", choice=1, reads=True)
    rows: Any = SimpleNamespace(counts=[3], owners=None)

    def collector(one: Any) -> Collector:
        member = Member(declaration, cast(Any, SimpleNamespace(one=one)), (0, 3))
        return Collector([member], rows, one, 1, False, 0)

    found = [
        (collector(Probe("p", "", positions="all")), {"": torch.zeros(3, 2)}),
        (collector(Hold("s", "", None, "p", 0.0, 0.0, 1.0)), {"": torch.zeros(1)}),
    ]
    layout = made_layout(7, [Served(declaration, 0, 4)], 2, Arrangement(found))
    (entry,) = layout.entries
    assert (layout.id, entry.request, entry.choice, entry.index) == (7, "r", 1, 6)
    places = [(slot.name, part.shape, part.offset, part.size) for slot in entry.slots for part in slot.parts]
    assert places == [("p", (3, 2), 0, 24), ("s", (), 24, 4)]
    # The prompt is not computed to its end.
    assert not made_layout(8, [Served(declaration, 0, -1)], 0, Arrangement(found)).entries


def test_a_drafted_request_has_an_entry_for_each_token_that_it_got() -> None:
    """Two requests, of whose three rows two and one count. The reads of a row lie side by side."""
    both: list[Any] = [SimpleNamespace(request=name, choice=0, reads=True) for name in "ab"]
    served = [Served(both[0], 13, 6, drafts=2, taken=1), Served(both[1], 9, 3, drafts=2)]

    def collector(one: Any) -> Collector:
        op = cast(Any, SimpleNamespace(one=one))
        spans = [(each, row, place * 3 + row) for place, each in enumerate(both) for row in range(3)]
        members = [Member(each, op, (start, 1), draft=row) for each, row, start in spans]
        found = Collector(members, cast(Any, SimpleNamespace(counts=[1] * 6, owners=None)), one, 1, False, 0)
        found.found[0] = torch.arange(6.0)
        found.keep([one.draft <= (1 if one.declaration is both[0] else 0) for one in members])
        return found

    results = [(one, one.results(lambda _: None) or {}) for one in (collector(Probe(name, "")) for name in "pq")]
    arrangement = Arrangement(results)
    layout = made_layout(7, served, 0, arrangement)
    assert [(one.request, one.index) for one in layout.entries] == [("a", 6), ("a", 7), ("b", 3)]
    places = [[slot.parts[0].offset for slot in one.slots] for one in layout.entries]
    assert places == [[0, 4], [8, 12], [16, 20]]
    assert arrangement.join().view(torch.float32).tolist() == [0, 0, 1, 1, 3, 3]
