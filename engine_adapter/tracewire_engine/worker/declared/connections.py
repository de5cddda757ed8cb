"""Connects the groups of a plan with what they depend on: conditions, the probes that decide them, and controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from tracewire_bus.wire.messages import Hold, Probe, When

from .conditions import RowCondition, Signals, Watch, Windows
from .groups import Group
from .later_groups import HoldGroup
from .members import Member

if TYPE_CHECKING:
    from .ops import Declaration

__all__ = ["connect", "made_windows"]


def made_windows(
    signals: Signals, declarations: Iterable[Declaration], total: int, ids: Callable[[], torch.Tensor]
) -> Windows | None:
    """The windows of the rows of those requests with conditions that are patterns of token ids, if there are any."""
    spans = [(one.tokens, *one.rows) for one in declarations if one.tokens is not None and one.rows is not None]
    return Windows(signals, spans, total, ids) if spans else None


def connect(
    signals: Signals, groups: Sequence[Group], windows: Windows | None, declarations: Iterable[Declaration]
) -> bool:
    """Connect the groups of a plan of these requests. Returns whether any of them depends on something."""
    found = False
    # Most interventions depend on nothing.
    linked = any(one.slots or one.controls for one in declarations)
    for group in groups:
        if group.one.when is not None:
            patterns = [op.token_patterns for op in group.members.ops()]
            members = [_conditional(one) for one in group.members]
            condition = RowCondition(signals, members, windows, group.rows.numbers, patterns)
            group.condition = None if condition.always else condition
        if isinstance(group, HoldGroup):
            group.begin(signals)
        if linked and isinstance(group.one, Probe):
            entries = _entries(group)
            group.watch = Watch(signals, entries) if entries else None
        found |= group.condition is not None or group.watch is not None or isinstance(group, HoldGroup)
    return found


def _conditional(member: Member) -> tuple[int, When, int, int, int]:
    when = member.op.one.when
    assert when is not None
    # The last position of a prompt samples token 0.
    prompt = max(0, 1 - member.index)
    return member.declaration.slots.get(member.place, 0), when, member.index, prompt, member.span[1]


def _entries(group: Group) -> list[tuple[int, int, When | None]]:
    """What depends on the numbers of a group of probes (`Watch`)."""
    shape = getattr(group.one.weight, "shape", (1,))
    outputs = 4 if group.one.reduce == "moments" else shape[0] if len(shape) == 2 else 1
    entries: list[tuple[int, int, When | None]] = []
    for number, member in enumerate(group.members):
        declaration, probe = member.declaration, member.op.one
        assert isinstance(probe, Probe)
        if not declaration.slots and not declaration.controls:
            continue
        for place, op in enumerate(declaration.ops):
            when = op.one.when
            if when is not None and when.probe == probe.name and place in declaration.slots:
                entries.append((number * outputs + when.output, declaration.slots[place], when))
            # In closed form, a controller computes the probe's value itself.
            if isinstance(op.one, Hold) and op.one.probe == probe.name and op.one.gain is not None:
                entries.append((number * outputs + op.one.output, declaration.controls[place][0], None))
    return entries
