"""Two submissions of one id at the same time."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_bus.bus import Bus, QueueFull
from tracewire_bus.wire.messages import Invoke, Submission


async def test_a_trace_that_two_submit_at_once_keeps_its_record(embedded: str, prefix: str, bus: Bus) -> None:
    """One is refused, since too many wait; before it takes its record back, there is room for the other."""
    one = Submission(trace="one", model="tiny", invokes=[Invoke(prompt="x")], deadline_s=1e6)
    async with Bus.open(embedded, prefix=prefix) as other:
        full = [msgspec.structs.replace(one, trace=f"full{number}") for number in range(2)]
        for submission in full:
            await bus.submit(submission)
        forget = bus.records.forget

        async def forgetting(trace: str, model: str) -> None:
            for submission in full:
                assert await other.queue.withdraw("tiny", submission.trace)
            await other.submit(one, 1)
            await forget(trace, model)

        bus.records.forget = forgetting  # type: ignore[method-assign]
        with pytest.raises(QueueFull):
            await bus.submit(one, 1)
        assert await other.queue.waiting("tiny") == 1
        assert await other.records.left("one") != (False, None)
        await other.cancel("one", by="somebody")
        assert await other.queue.waiting("tiny") == 0
