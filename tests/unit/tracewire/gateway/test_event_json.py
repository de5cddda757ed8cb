"""Each kind of event as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.messages import EVENTS
from tracewire.gateway.event_json import event_json, failure_json
from tracewire.traces.output import Output, Shared
from tracewire_bus.wire.codec import decode_event, encode
from tracewire_bus.wire.messages import Failure


def read(event: Any) -> Any:
    """An event as a client reads it."""
    return decode_event(encode(event), Output, Shared)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: f"{type(event).__name__}-{event.seq}")
def test_each_kind_is_plain_json_with_its_type_and_its_id(event: Any) -> None:
    found = msgspec.json.decode(msgspec.json.encode(event_json(read(event), "list", "t")))
    assert (found["type"], found["id"]) == (read(event).type, event.id)


def test_what_they_say() -> None:
    by_seq = {(event.attempt, event.seq): event_json(read(event), "list", "t") for event in EVENTS}
    accepted, output, scored = by_seq[1, 0], by_seq[1, 1], by_seq[1, 2]
    assert (accepted["engine"], accepted["sampling"]) == ("e", [{"seed": None, "stop": ["a"]}])
    assert (output["invoke"], output["choice"], output["index"], output["text"]) == (2, 3, 4, "täxt")
    assert scored["stop_reason"] == 13
    assert scored["logprobs"][0][0] == {"token_id": 7, "logprob": -0.5, "rank": 1, "text": "a"}
    steered = by_seq[1, 4]
    assert steered["first"] == [{"invoke": 0, "choice": 1, "index": 4}]
    assert steered["changes"] == [{"version": 2, "by": "c", "time": 0.005, "values": {"alpha": 0.5}}]
    assert (by_seq[1, 5]["by"], by_seq[1, 7]["reason"], by_seq[2, 0]["attempt"]) == ("c", "lost", 2)
    final = by_seq[2, 9]
    assert final["error"] == {"type": "ValueError", "message": "no", "line": 3}
    assert final["manifest"][0]["digest"] == "30" * 16
    assert final["save_errors"] == {"0.0.y": "cannot travel"}


def test_a_failure_has_what_it_has() -> None:
    assert failure_json(None) is None
    assert failure_json(Failure(type="T", message="m", by="me")) == {"type": "T", "message": "m", "by": "me"}
