"""What the adapter waits for of what the workers report of a request. No engine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tracewire_bus.wire.messages import Append
from tracewire_engine.adapter.pending import PendingRecords
from tracewire_engine.protocol.messages import FinishRecord, StepRecord

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


@pytest.mark.parametrize(
    ("last", "failed"),
    [
        (StepRecord("r", 1, 1, NOTHING), False),
        (StepRecord("r", 1, 1, NOTHING, "error"), True),
        (FinishRecord("r", 1, NOTHING, steps=1), False),
    ],
    ids=["its step", "its failure", "its end"],
)
async def test_the_last_step_is_waited_for(last: StepRecord | FinishRecord, failed: bool) -> None:
    """Two tokens of each of two choices: all but the last report is there."""
    pending = PendingRecords(2)
    for choice, index in ((0, 0), (0, 1), (1, 0)):
        pending.step(StepRecord("r", choice, index, NOTHING), 0.0)
    waiting = asyncio.ensure_future(pending.wait_reported([2, 2]))
    await asyncio.sleep(0)
    assert not waiting.done()
    if isinstance(last, StepRecord):
        pending.step(last, 0.0)
    else:
        pending.finish(last)
    await asyncio.wait_for(waiting, 10)
    assert pending.failed == failed


async def test_the_last_step_is_waited_for_beside_a_guard() -> None:
    """One task looks for a failure all the while: neither takes the other's word."""
    pending = PendingRecords(1)
    guard = asyncio.ensure_future(pending.wait_failed())
    await asyncio.sleep(0)
    pending.step(StepRecord("r", 0, 0, NOTHING), 0.0)
    waiting = asyncio.ensure_future(pending.wait_reported([2]))
    for _ in range(3):
        await asyncio.sleep(0)
    pending.step(StepRecord("r", 0, 1, NOTHING, "error"), 0.0)
    await asyncio.wait_for(asyncio.gather(waiting, guard), 10)


async def test_nothing_is_waited_for_that_no_step_reports() -> None:
    await asyncio.wait_for(PendingRecords(1, block=False).wait_reported([5]), 10)


def appended(*items: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode([Append(path=("seen",), items=list(items))]))


async def test_what_was_saved_behind_the_end_is_no_output_s_nor_the_final_s() -> None:
    """The block ends at token 1, and vLLM's output has three tokens by then."""
    pending = PendingRecords(1)
    for index in range(4):
        pending.step(StepRecord("r", 0, index, appended(index), "stop" if index == 1 else ""), 0.0)
    pending.finish(FinishRecord("r", 0, NOTHING, steps=4, tokens=2))
    assert await pending.steps(0, 0, 3) == [appended(0), appended(1), NOTHING]
    assert pending.choices[0].take_rest(2) == []


async def test_the_earlier_end_counts() -> None:
    pending = PendingRecords(1)
    for index, ended in ((0, ""), (2, "error"), (1, "stop")):
        pending.step(StepRecord("r", 0, index, NOTHING, ended), 0.0)
    assert (pending.choices[0].ended, pending.choices[0].ended_at) == ("stop", 1)


def test_a_record_in_the_place_of_another_counts_once() -> None:
    """A process of blocks can report one token again and again."""
    large, small = (msgspec.Raw(msgspec.msgpack.encode([["s", ["x"], bytes(size)]])) for size in (1 << 16, 1))
    once, again = PendingRecords(1), PendingRecords(1)
    once.step(StepRecord("r", 0, 7, small), 0.0)
    for deltas in (small, large, small):
        again.step(StepRecord("r", 0, 7, deltas), 0.0)
    assert again.nbytes == once.nbytes
