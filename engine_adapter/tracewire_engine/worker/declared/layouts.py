"""Which bytes of a plan's steps belong to which read."""

from __future__ import annotations

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
    for collector, places in arrangement.places:
        parts: list[list[Part]] = [[] for _ in collector.members]
        flat = collector.each_one or getattr(collector.one, "positions", "last") == "last"
        for name, values, offset, stride in places:
            size = values.nbytes // max(1, values.shape[0])
            dtype = TORCH_DTYPES[values.dtype]
            tail = tuple(values.shape[1:])
            row = 0
            for index, count in enumerate(collector.counts):
                shape = tail if flat else (count, *tail)
                parts[index].append(Part(name, dtype, shape, offset + row * stride, count * size))
                row += count
        for member, own in zip(collector.members, parts, strict=True):
            slots[id(member.declaration), member.draft].append(Slot(getattr(member.op.one, "name", ""), own))
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
