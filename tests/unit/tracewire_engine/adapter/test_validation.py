"""A submission that is too much, or does not fit the model, is refused by its field."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine
from tests.support.served import failure, many, runs, served, submission
from tracewire_bus.bus import Bus
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.domain.limits import MAX_INVOKES, MAX_SOURCE
from tracewire_bus.wire.codec import NewerSchema, decode_submission, encode
from tracewire_bus.wire.messages import REQUEST_SCHEMA, Invoke, Steer, Submission
from tracewire_bus.wire.packing import pack, wire
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.validation import Validator


async def test_interventions_are_placed_once_for_each_form_in_which_they_come(bus: Bus) -> None:
    adapter = Adapter(PlayedEngine(), engine_info(), bus)

    def placed(by: Any, vector: float = 1.0, at: str = "residual(1)", **live: Any) -> bytes | None:
        steer = tracewire.Steer(at, np.full(8, vector, np.float32), scale=by)
        submission = Submission(
            trace="t",
            model="tiny",
            invokes=[Invoke(prompt="p")],
            interventions=normalize([steer]),
            live=pack(live),
        )
        data = encode(submission)
        return adapter._validator._place(decode_submission(data), data)

    first = placed(1.0)
    # The very same, and not merely equal.
    assert placed(1.0) is first
    scale = tracewire.Live("scale")
    others = [placed(2.0), placed(1.0, 2.0), placed(1.0, at="residual(2)"), placed(scale, scale=1.0)]
    assert len({first, *others}) == 5
    assert placed(scale, scale=1.0) is others[-1]
    # What its live parameters are decides whether it fits.
    with pytest.raises(Rejection, match="must be a number"):
        placed(scale, scale="much")
    with pytest.raises(Rejection, match="was not declared"):
        placed(scale)
    for vector in range(3, 203):
        placed(1.0, float(vector))
    assert len(adapter._validator._placed) <= 64


async def test_a_submission_of_a_later_major_schema_of_requests_is_refused(bus: Bus) -> None:
    """Events are ahead of requests: their schema says nothing of a submission."""
    validator = Adapter(PlayedEngine(), engine_info(), bus)._validator
    data = encode(submission("t"))
    later = f"{REQUEST_SCHEMA[0] + 1}.0"
    with pytest.raises(NewerSchema):
        await validator.validate("t", later, data)
    assert (await validator.validate("t", f"{REQUEST_SCHEMA[0]}.99", data)).submission.trace == "t"


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"invokes": many(b"\x80", 1_000_000)}, "submission", "500000 values"),
        ({"invokes": [{"messages": [{"content": many(b"\x90", 40_000)}]}]}, "submission", "30000 lists"),
        ({"live": msgspec.msgpack.encode({"a": many(b"\x90", 40_000)})}, "live", "30000 lists"),
        ({"shared": pack({(n, n): 0 for n in range(2000)})}, "shared", "1024 keys that are tuples"),
        (
            {"block": {"name": "b", "source": "0", "variables": pack([{(n, n) for n in range(2000)}])}},
            None,
            "1024 keys",
        ),
        ({"invokes": [{"prompt": "x"}] * (MAX_INVOKES + 1)}, "invokes", "at most 1024 prompts, got 1025"),
        ({"context": {"a": "x" * 40_000_000}}, "submission", "may take 33554432"),
        ({"block": {"name": "b", "source": "x" * (MAX_SOURCE + 1)}}, "block", "longer than 100000 characters"),
        ({"deadline_s": float("nan")}, "deadline", "expected seconds from now, got nan"),
        ({"edits": ["e"] * 65}, "edits", "at most 64 edits, got 65"),
        ({"invokes": msgspec.Raw(b"\x91" * 200 + b"\xc0")}, "submission", "could not be decoded"),
    ],
)
async def test_an_engine_refuses_what_is_too_much_by_its_field(
    fields: dict[str, Any], field: str | None, says: str, bus: Bus, embedded: str, prefix: str
) -> None:
    data = msgspec.msgpack.encode({"trace": "t", "model": "tiny", "invokes": [{"prompt": "x"}], **fields})
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny")
        # Redis would refuse what is too large for the engine, unless somebody raises the limit there.
        await bus.command("HSET", bus.keys.queue("tiny", "state"), "bytes", 10**9)
        await bus.queue.put("tiny", "t", data)
        error = await failure(client, "t")
        assert says in error.message
        assert field is None or error.field == field
        await runs(client)


@pytest.mark.parametrize(
    ("vector", "light"),
    [
        (np.ones(100_000, np.float32), True),
        (np.ones(300_000, np.float32), False),
        ([1] * 9000, False),
    ],
    ids=["a vector", "a large vector", "many numbers"],
)
async def test_only_what_holds_much_is_looked_at_on_a_thread(
    vector: Any, light: bool, bus: Bus, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, what comes in a burst would come one by one."""
    placing: list[int] = []
    place = Validator._place

    def noted(self: Validator, *arguments: Any) -> bytes | None:
        placing.append(threading.get_ident())
        return place(self, *arguments)

    monkeypatch.setattr(Validator, "_place", noted)
    data = encode(submission(interventions=[Steer(at="residual(1)", vector=wire(vector))]))
    async with served(bus, embedded, prefix) as (_, client):
        await bus.command("HSET", bus.keys.record("t"), "m", "tiny")
        await bus.queue.put("tiny", "t", data)
        # The model has one number in each position.
        assert (await failure(client, "t")).field.startswith("interventions")
    assert [thread == threading.get_ident() for thread in placing] == [light]
