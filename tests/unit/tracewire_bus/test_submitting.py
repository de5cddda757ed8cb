"""Submitting a trace: its record and its entry, and what is left of one that the queue refuses."""

from __future__ import annotations

import pytest

from tests.support.streams import submission
from tracewire_bus.bus import Bus
from tracewire_bus.store.queue_entries import SubmissionRefused


async def test_a_record_says_whose_it_is(bus: Bus) -> None:
    assert await bus.records.owner("t") is None
    assert await bus.submit(submission(), owner="one")
    # A repeat, such as after a lost reply.
    assert await bus.submit(submission(), owner="one")
    assert not await bus.submit(submission(), owner="another")
    assert not await bus.submit(submission())
    assert await bus.records.owner("t") == "one"
    assert await bus.queue.waiting("demo") == 1
    assert await bus.submit(submission("u"))
    assert await bus.records.owner("u") == ""


async def test_a_submission_that_exceeds_a_limit_of_the_engines_leaves_no_record(bus: Bus) -> None:
    await bus.command("HSET", bus.keys.queue("demo", "state"), "bytes", 10)
    with pytest.raises(SubmissionRefused, match="submission-bytes: a submission has at most 10 bytes") as caught:
        await bus.submit(submission())
    assert caught.value.limit == "submission-bytes"
    assert not await bus.exists("t")
    assert await bus.queue.waiting("demo") == 0
