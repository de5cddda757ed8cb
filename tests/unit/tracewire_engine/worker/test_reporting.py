"""Reports of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.equality import equal
from tracewire_bus.wire.messages import Append, Delta
from tracewire_bus.wire.packing import decoder, wire
from tracewire_engine.worker.blocks.time_limit import BlockTimeout
from tracewire_engine.worker.host_copy import HostCopy, encoded_late
from tracewire_engine.worker.reporting import _collect_new, _encoded
from tracewire_engine.worker.save_tracker import SaveTracker

ENCODER = msgspec.msgpack.Encoder(enc_hook=encoded_late)


DELTAS = decoder(list[Delta])


def test_a_step_of_one_item_is_encoded_as_any_other() -> None:
    for shape in ((0,), (1,), (7,), (3, 100), (40_000,)):
        value, host = torch.ones(shape, dtype=torch.bfloat16), HostCopy()
        host.prime([value])
        deltas = [Append(path=("name",), items=[host.array(value) or wire(value)])]
        (mine,), (other,) = DELTAS(_encoded(deltas)), DELTAS(ENCODER.encode(deltas))
        assert (type(mine), mine.path) == (type(other), other.path)
        assert equal(mine.items, other.items)
        assert equal(mine.items, [value])


def test_a_time_that_is_up_while_arrays_are_found_is_met_where_the_trace_fails() -> None:
    tracker = SaveTracker()
    saves: dict[str, Any] = {"held": {}, "more": [torch.ones(1)]}
    tracker.step(saves)

    @contextmanager
    def over() -> Iterator[None]:
        raise BlockTimeout("the time is up")
        yield

    tracker.guard = over
    saves["held"]["new"] = torch.zeros(1)
    found: list[Any] = []
    _collect_new(tracker, saves, found)
    assert found == []
    with pytest.raises(BlockTimeout):
        tracker.step(saves)
