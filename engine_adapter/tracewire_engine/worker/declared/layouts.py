"""Which bytes of a plan's steps belong to which read."""

from __future__ import annotations

from collections.abc import Sequence

from tracewire_engine.protocol.messages import Layout, LayoutEntry, Part, Slot
from tracewire_engine.worker.host_copy import TORCH_DTYPES

from .groups import Arrangement
from .ops import Declaration

__all__ = ["made_layout"]


def made_layout(
    number: int, declarations: Sequence[tuple[Declaration, int, int]], steps: int, arrangement: Arrangement
) -> Layout:
    """The layout of a plan's reads.

    Args:
        number: the layout's id.
        declarations: of the plan, each with the index of the token that the plan's first step samples as the last item.
        steps: how many steps the plan has served before this one.
        arrangement: the place of each row of the reads.
    """
    slots: dict[int, list[Slot]] = {id(declaration): [] for declaration, *_ in declarations}
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
            slots[id(member.declaration)].append(Slot(getattr(member.op.one, "name", ""), own))
    entries = []
    for declaration, _, first in declarations:
        # A negative index: the prompt is not computed to its end, and the step samples no token.
        if declaration.reads and first >= 0:
            items = slots[id(declaration)]
            entries.append(LayoutEntry(declaration.request, declaration.choice, first + steps, items))
    return Layout(number, entries)
