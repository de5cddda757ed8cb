"""What declared interventions read, decoded on the adapter's side."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tests.support.declared_plans import (
    DELTAS,
)
from tracewire_bus.domain.intervention_checks import decoded, normalized
from tracewire_bus.wire.digests import digest, list_digest
from tracewire_bus.wire.messages import Append, StopWhen
from tracewire_engine.adapter.read_decoder import ChoiceReads, Item, extend_encoded_list
from tracewire_engine.protocol.messages import Part, Slot


def test_a_stop_condition_counts_steps_in_a_row() -> None:
    (one,) = decoded(normalized([StopWhen("p", above=1.0, steps=2)]))
    reads = ChoiceReads([one])

    class Number:
        name = "p"
        append = start = (b"", b"")

        def __init__(self, value: float) -> None:
            self.value = value

        def take(self, data: memoryview, blobs: Any, strings: Any) -> Any:
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


def test_a_logit_lens_has_strings_of_the_shape_of_its_ids() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    logits = ids.astype(np.float32)
    parts = [Part("token_ids", "int32", (2, 3, 2), 0, 48), Part("logits", "float32", (2, 3, 2), 48, 48)]
    for strings in (None, lambda found: [f"<{one}>" for one in found]):
        reads = ChoiceReads()
        reads.strings = strings
        reads.take(0, [Item(Slot("lens", parts))], memoryview(ids.tobytes() + logits.tobytes()))
        (delta,) = DELTAS(bytes(extend_encoded_list(b"\x90", reads.steps[0])))
        (item,) = delta.value
        np.testing.assert_array_equal(item["token_ids"], ids)
        np.testing.assert_array_equal(item["logits"], logits)
        expected = [[[f"<{one}>" for one in row] for row in rows] for rows in ids.tolist()]
        assert item.get("token_strings") == (None if strings is None else expected)
        (entry,) = reads.manifest(0, 1)
        assert entry.digest == list_digest([digest(item)])
