"""What a trace's blocks share, in the worker."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.messages import (
    SharedValues,
)
from tracewire_engine.worker.blocks.shared_values import SharedRuns
from tracewire_engine.worker.large_arrays import LargeArrayBudget


@pytest.fixture
def runs() -> SharedRuns:
    """No runs yet."""
    return SharedRuns(torch.device("cpu"), LargeArrayBudget(0))


def share(**members: int) -> bytes:
    """One list, for requests with so many choices each."""
    return msgspec.msgpack.encode(SharedValues("s", members, pack({"rows": [1]})))


def test_a_value_lives_from_the_first_request_to_the_last_in_whatever_order(runs: SharedRuns) -> None:
    first = runs.join(share(a=1, b=2))
    first.values["rows"].append(2)
    assert runs.leave("a", 0) is None
    # Nobody is there, and more will come.
    again = runs.join(share(a=1, b=2))
    assert again.values["rows"] is first.values["rows"]
    assert runs.leave("b", 1) is None
    assert runs.leave("b", 1) is None
    assert runs.leave("b", 0) is first
    assert not runs.runs
    assert runs.leave("b", 0) is None
    assert runs.join(share(a=1)).values == {"rows": [1]}


def test_requests_that_never_ran_count_and_those_that_never_came_can_be_forgotten(runs: SharedRuns) -> None:
    assert runs.leave("b", 0) is None
    run = runs.join(share(a=1, b=1, c=1))
    assert runs.leave("c", 0) is None
    assert runs.leave("a", 0) is None
    assert list(runs.runs.values()) == [run]
    runs.forget("s")
    runs.forget("s")
    assert not runs.runs
    assert runs.leave("b", 0) is None
