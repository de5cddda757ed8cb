"""Every kind of declared intervention has a class of groups that runs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tracewire_bus.wire.messages import AttentionPattern, Features, Hold, Patch, Probe, Steer
from tracewire_engine.worker.declared.attention import KeyGroup, PatternGroup
from tracewire_engine.worker.declared.groups import EditGroup, ReadGroup
from tracewire_engine.worker.declared.kinds import group_kind
from tracewire_engine.worker.declared.later_groups import FeaturesGroup, HoldGroup
from tracewire_engine.worker.declared.members import Member
from tracewire_engine.worker.declared.patches import KeepGroup, PatchGroup


def test_a_kind_has_its_own_group_or_that_of_all_reads_or_edits() -> None:
    def of(one: Any, *, keys: bool = False, gives: bool = False) -> type:
        op = SimpleNamespace(one=one, reads=isinstance(one, Probe | AttentionPattern), gives=gives)
        return group_kind(Member(cast(Any, None), cast(Any, op), (0, 1), keys=keys))

    assert of(Patch("", None)) is PatchGroup
    assert of(Patch("", prompt=0)) is PatchGroup
    assert of(Patch("", prompt=0), gives=True) is KeepGroup
    assert of(Features("f", "", "sae")) is FeaturesGroup
    assert of(Hold("s", "", None, "p", 1.0, 0.0, 1.0)) is HoldGroup
    assert of(Probe("p", "")) is ReadGroup
    assert of(AttentionPattern("p", "")) is PatternGroup
    assert of(AttentionPattern("p", ""), keys=True) is KeyGroup
    assert of(Steer("", None)) is EditGroup
