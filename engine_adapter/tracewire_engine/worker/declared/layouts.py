"""Which bytes of a plan's steps belong to which read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tracewire_engine.protocol.messages import Layout, LayoutEntry, Part, Slot
from tracewire_engine.worker.host_copy import TORCH_DTYPES

from .drafted_rows import Served
from .groups import Arrangement

__all__ = ["made_layout"]


def made_layout(number: int, declarations: Sequence[Served], steps: int, arrangement: Arrangement) -> Layout:
    """The layout of a plan's reads. A request has an entry for each token that it has got by the step.

    Args:
        number: the layout's id.
        declarations: of the plan.
        steps: how many steps the plan has served before this one.
        arrangement: the place of each row of the reads.
    """
    slots: dict[tuple[int, int], list[Slot]] = {
        (id(one.declaration), draft): [] for one in declarations for draft in range(one.taken + 1)
    }
    # Most collectors are of the same requests.
    by_owners: dict[int, list[list[Slot]]] = {}
    for collector, places in arrangement.places:
        flat = collector.each_one or getattr(collector.one, "positions", "last") == "last"
        counts = collector.counts
        firsts = list(itertools.accumulate(counts, initial=0))[:-1]
        columns = []
        for name, values, offset, stride in places:
            size = values.nbytes // max(1, values.shape[0])
            dtype = TORCH_DTYPES[values.dtype]
            tail = tuple(values.shape[1:])
            columns.append(
                [
                    Part(name, dtype, tail if flat else (count, *tail), offset + row * stride, count * size)
                    for row, count in zip(firsts, counts, strict=True)
                ]
            )
        owners = collector.owners
        found = by_owners.get(id(owners))
        if found is None:
            found = by_owners[id(owners)] = [slots[owner] for owner in owners]
        for own, member, *parts in zip(found, collector.members, *columns, strict=True):
            own.append(Slot(getattr(member.op.one, "name", ""), parts))
    entries = []
    for one in declarations:
        declaration = one.declaration
        # A negative index: the prompt is not computed to its end, and the step samples no token.
        if not declaration.reads or one.index < 0:
            continue
        for draft in range(one.taken + 1):
            items = slots[id(declaration), draft]
            entries.append(LayoutEntry(declaration.request, declaration.choice, one.index + steps + draft, items))
    return Layout(number, entries)
