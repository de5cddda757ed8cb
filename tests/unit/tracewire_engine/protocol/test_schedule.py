"""The scheduled changes of one prompt reach the requests of its choices, in order."""

from __future__ import annotations

from typing import Any

from tracewire_bus.wire.messages import ScheduledChange
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.schedule import decode_schedule, encode_schedule


def change(index: int, alpha: float, **where: Any) -> ScheduledChange:
    return ScheduledChange(index=index, values=pack({"alpha": alpha}), **where)


def test_a_choice_gets_its_own_changes_in_the_order_of_tokens() -> None:
    changes = [change(9, 1.0), change(3, 2.0, invoke=1), change(3, 3.0, invoke=0, choice=1), change(9, 4.0, choice=0)]
    encoded = encode_schedule(changes, 0)
    assert encoded is not None
    assert [(one.index, one.values["alpha"]) for one in decode_schedule(encoded, 0)] == [(9, 1.0), (9, 4.0)]
    assert [(one.index, one.values["alpha"]) for one in decode_schedule(encoded, 1)] == [(3, 3.0), (9, 1.0)]


def test_a_prompt_without_changes_has_no_argument() -> None:
    assert encode_schedule([change(3, 2.0, invoke=1)], 0) is None
