"""Which class runs the interventions of which kind."""

from __future__ import annotations

from tracewire_bus.wire.messages import Patch

from .groups import EditGroup, Group, ReadGroup
from .ops import Op
from .patches import PatchGroup

__all__ = ["group_kind"]

_GROUPS: dict[type, type[Group]] = {Patch: PatchGroup}


def group_kind(op: Op) -> type[Group]:
    """The class of the group that runs an intervention."""
    return _GROUPS.get(type(op.one), ReadGroup if op.reads else EditGroup)
