"""Which bytes of a step belong to which read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from tracewire_bus.wire.messages import Hold, Probe
from tracewire_engine.worker.declared.groups import Arrangement, Collector, Member
from tracewire_engine.worker.declared.layouts import made_layout


def test_a_read_has_its_rows_and_a_controller_one_number() -> None:
    declaration: Any = SimpleNamespace(request="r", choice=1, reads=True)
    rows: Any = SimpleNamespace(counts=[3])

    def collector(one: Any) -> Collector:
        member = Member(declaration, cast(Any, SimpleNamespace(one=one)), (0, 3))
        return Collector([member], rows, one, 1, False, 0)

    found = [
        (collector(Probe("p", "", positions="all")), {"": torch.zeros(3, 2)}),
        (collector(Hold("s", "", None, "p", 0.0, 0.0, 1.0)), {"": torch.zeros(1)}),
    ]
    layout = made_layout(7, [(declaration, 0, 4)], 2, Arrangement(found))
    (entry,) = layout.entries
    assert (layout.id, entry.request, entry.choice, entry.index) == (7, "r", 1, 6)
    places = [(slot.name, part.shape, part.offset, part.size) for slot in entry.slots for part in slot.parts]
    assert places == [("p", (3, 2), 0, 24), ("s", (), 24, 4)]
    # The prompt is not computed to its end.
    assert not made_layout(8, [(declaration, 0, -1)], 0, Arrangement(found)).entries
