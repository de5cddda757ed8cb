"""What declared interventions read, decoded on the adapter's side."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.declared_plans import (
    DELTAS,
)
from tracewire_bus.domain.intervention_checks import decoded, normalized
from tracewire_bus.wire.messages import Append, StopWhen
from tracewire_engine.adapter.read_decoder import ChoiceReads, extend_encoded_list


def test_a_stop_condition_counts_steps_in_a_row() -> None:
    (one,) = decoded(normalized([StopWhen("p", above=1.0, steps=2)]))
    reads = ChoiceReads([one])

    class Number:
        name = "p"
        append = start = (b"", b"")

        def __init__(self, value: float) -> None:
            self.value = value

        def take(self, data: memoryview, blobs: Any) -> Any:
            return b"", b"", (self.value,)

    for index, value in enumerate([2.0, 0.0, 2.0, 2.0, 2.0]):
        reads.take(index, [Number(value)], memoryview(b""))
    assert reads.stopped is one
    assert reads.stopped_at == 3
    assert sorted(reads.steps) == [0, 1, 2, 3]


def test_an_append_follows_a_set_and_lists_join() -> None:
    encoded = msgspec.msgpack.encode([Append(path=("a",), items=[1])])
    more = [msgspec.msgpack.encode(Append(path=(f"n{number}",), items=[number])) for number in range(20)]
    found = DELTAS(bytes(extend_encoded_list(encoded, more)))
    assert [delta.path[0] for delta in found] == ["a", *(f"n{number}" for number in range(20))]
