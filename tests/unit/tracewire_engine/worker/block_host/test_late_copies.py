"""Rows that arrive later, copied once for all traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.hosted_model import HostedModel
from tracewire_engine.link.shared_rows import RowMemory, unpack_value
from tracewire_engine.worker.block_host import hosted_blocks
from tracewire_engine.worker.block_host.late_copies import LateCopies
from tracewire_engine.worker.block_host.rows import SharedRows, StepRows

READS = """
hidden = [].save()
for step in tracer.iter[:]:
    hidden.append(model.model.layers[1].output[0].clone())
"""


@pytest.mark.parametrize("spans", [[(0, 1), (3, 2)], [(1, 2)]])
def test_rows_are_there_when_they_have_arrived(spans: list[tuple[int, int]]) -> None:
    value: Any = (torch.arange(10.0).view(5, 2), torch.arange(10).view(1, 5, 2), torch.ones(7), torch.empty(5, 0))
    memory, copies = RowMemory.create(1 << 16), LateCopies()
    rows = StepRows(spans, [0], 5, 9)
    shared = SharedRows(value, rows, memory, by_request=False, copies=copies)
    other = SharedRows(value, rows, RowMemory.create(1 << 16), by_request=False, copies=copies)
    assert [one.whole for one in shared.late] == [one.whole for one in other.late]
    expected = unpack_value(
        SharedRows(value, rows, memory, by_request=False).shared, lambda _, shape: memory.read(shape), lambda _: None
    )
    for late in shared.late:
        late.arrive(memory)
    for late in other.late:
        late.drop()
    found = unpack_value(shared.shared, lambda _, shape: memory.read(shape), lambda _: None)
    assert repr(found) == repr(expected)


def test_turns_whose_rows_come_late_are_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HostedModel()
    reach = hosted_blocks.BlockHost.reach

    def late(self: Any, *given: Any, copies: Any = None, **more: Any) -> None:
        reach(self, *given, copies=LateCopies(), **more)

    monkeypatch.setattr(hosted_blocks.BlockHost, "reach", late)
    writes = READS + "    model.model.layers[2].output[0][:] = 0\n"
    found = model.run({"reads": READS, "writes": writes, "again": READS}, steps=5)
    for one in found.values():
        assert one.finish is not None
        assert one.finish.error is None
        assert len(one.saves["hidden"]) == 5
    assert (found["reads"].saves["hidden"][4] != 0).any()
    model.close()
