"""A rejection carries the failure that its trace ends with."""

from __future__ import annotations

from tracewire_bus.wire.messages import Failure
from tracewire_engine.adapter.engine_api import Rejection


def test_a_rejection_names_the_field_and_the_line() -> None:
    rejection = Rejection("block", "no such module", type="UnknownModulePath", line=3)
    assert str(rejection) == "no such module"
    assert rejection.failure == Failure(type="UnknownModulePath", message="no such module", field="block", line=3)
    assert Rejection("prompt", "too long").failure.type == "TraceRejected"
