"""Which class runs the interventions of which kind."""

from __future__ import annotations

from tracewire_bus.wire.messages import (
    AttentionPattern,
    Coordinates,
    Features,
    HeadAblate,
    HeadProbe,
    Hold,
    Lens,
    Patch,
    Project,
    SteerFeatures,
)

from .attention import KeyGroup, PatternGroup
from .groups import EditGroup, Group, ReadGroup
from .heads import HeadAblateGroup, HeadReadGroup
from .later_groups import CoordinatesGroup, FeaturesGroup, HoldGroup, LensGroup, ProjectGroup, SteerFeaturesGroup
from .members import Member
from .patches import KeepGroup, PatchGroup

__all__ = ["group_kind"]

_GROUPS: dict[type, type[Group]] = {
    AttentionPattern: PatternGroup,
    Coordinates: CoordinatesGroup,
    Features: FeaturesGroup,
    HeadAblate: HeadAblateGroup,
    HeadProbe: HeadReadGroup,
    Hold: HoldGroup,
    Lens: LensGroup,
    Patch: PatchGroup,
    Project: ProjectGroup,
    SteerFeatures: SteerFeaturesGroup,
}


def group_kind(member: Member) -> type[Group]:
    """The class of the group that runs an intervention at its rows."""
    if member.keys:
        return KeyGroup
    if member.op.gives:
        return KeepGroup
    return _GROUPS.get(type(member.op.one), ReadGroup if member.op.reads else EditGroup)
