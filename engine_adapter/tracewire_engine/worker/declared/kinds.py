"""Which class runs the interventions of which kind."""

from __future__ import annotations

from tracewire_bus.wire.messages import Coordinates, Features, Hold, Lens, Patch, Project, SteerFeatures

from .groups import EditGroup, Group, ReadGroup
from .later_groups import CoordinatesGroup, FeaturesGroup, HoldGroup, LensGroup, ProjectGroup, SteerFeaturesGroup
from .ops import Op
from .patches import PatchGroup

__all__ = ["group_kind"]

_GROUPS: dict[type, type[Group]] = {
    Coordinates: CoordinatesGroup,
    Features: FeaturesGroup,
    Hold: HoldGroup,
    Lens: LensGroup,
    Patch: PatchGroup,
    Project: ProjectGroup,
    SteerFeatures: SteerFeaturesGroup,
}


def group_kind(op: Op) -> type[Group]:
    """The class of the group that runs an intervention."""
    return _GROUPS.get(type(op.one), ReadGroup if op.reads else EditGroup)
