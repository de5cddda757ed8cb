"""Siblings of a trace, read side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.queue import settled
from tracewire import Client, Fan, FanStep, Gap, Output, Restarted
from tracewire.traces.recorder.fan import _distance, _Sibling
from tracewire_bus.events.subscription import Gap as EntryGap
from tracewire_bus.store.snapshots import Stored
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.messages import DecodedOutput, HeldChoice, Snapshot
from tracewire_bus.wire.packing import unpack

PATIENCE = 60


async def script(stage: Stage) -> None:
    """Six tokens. From the token of the last scheduled change on, the value decides how each goes on, and when."""
    await stage.accept()
    forced = stage.submission.invokes[0].forced_tokens
    value = unpack(stage.submission.schedule[-1].values)["alpha"] if stage.submission.schedule else 0.0
    length = 6 if value < 5 else 4
    for index in range(length):
        token = forced[index] if index < len(forced) else 100 + index
        if value and index >= 3:
            token = 200 + index
        logprobs = [{token: (math.log(0.75), 1, None), 7: (math.log(0.25), 2, None)}]
        await stage.publish(_output(stage, index, token, logprobs))
    await stage.final()


def _output(stage: Stage, index: int, token: int, logprobs: Any) -> Any:
    return DecodedOutput(
        attempt=1, seq=stage.seq, index=index, token_ids=[token], text=f" {token}", logprobs=logprobs, deltas=[[]]
    )


async def test_siblings_are_read_side_by_side(client: Client, engine: Callable[..., Any]) -> None:
    with anyio.fail_after(PATIENCE):
        async with engine(script, schema="2.5"), client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
            await trace.until_done()
            fan = await trace.fork([{"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 9.0}], at=2, logprobs=2)
            async with fan:
                steps = [step async for step in fan]
                results = await fan.results()
    assert [step.index for step in steps] == [2, 3, 4, 5]
    assert [step.token_ids for step in steps] == [[102] * 3, [103, 203, 203], [104, 204, None], [105, 205, None]]
    assert [step.same for step in steps] == [[True] * 3, *[[True, False, False]] * 3]
    assert fan.first_differences == [None, 3, 3]
    assert steps[0].distances == [0.0, 0.0, 0.0]
    assert steps[1].distances[1] == pytest.approx(0.5)
    assert steps[2].distances == [0.0, steps[2].distances[1], None]
    assert [len(result.token_ids) for result in results] == [6, 6, 4]
    assert {one.id for one in fan.traces}.isdisjoint({trace.id})
    assert isinstance(steps[0], FanStep)


async def test_a_running_trace_is_forked_by_another_client(
    client: Client, engine: Callable[..., Any], prefix: str
) -> None:
    going, go = anyio.Event(), anyio.Event()

    async def waits(stage: Stage) -> None:
        if stage.submission.invokes[0].forced_tokens:
            await script(stage)
            return
        await stage.accept()
        await stage.output("ab", [], [])
        going.set()
        await go.wait()
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with engine(waits, schema="2.5"), client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
            await going.wait()
            async with tracewire.connect(client.url, prefix=prefix) as other:
                fan = await other.fork(trace.id, [{"alpha": 1.0}])
                assert fan.at == 2
                async with fan:
                    assert (await anext(fan)).token_ids == [102]
            go.set()
            await trace.until_done()


def restarting(second: list[int]) -> Callable[[Stage], Any]:
    """A script of six tokens. The second sibling of a fan runs again after four, and then has these tokens."""

    async def play(stage: Stage) -> None:
        await stage.accept()
        schedule = stage.submission.schedule
        tokens = [100, 101, 102, 103, 104, 105]
        if schedule and unpack(schedule[-1].values)["alpha"] == 1.0:
            for index, token in enumerate(tokens[:4]):
                await stage.publish(_output(stage, index, token, None))
            await stage.restart()
            await stage.accept()
            tokens = second
        for index, token in enumerate(tokens):
            output = _output(stage, index, token, None)
            output.attempt = stage.attempt
            await stage.publish(output)
        await stage.final()

    return play


async def test_a_sibling_that_runs_again_has_each_token_once(client: Client, engine: Callable[..., Any]) -> None:
    tokens = [100, 101, 102, 103, 104, 105]
    with anyio.fail_after(PATIENCE):
        async with (
            engine(restarting(tokens), schema="2.5"),
            client.trace("tiny", "x", live={"alpha": 0.0}) as trace,
        ):
            await trace.until_done()
            async with await trace.fork([{"alpha": 0.0}, {"alpha": 1.0}], at=2) as fan:
                steps = [step async for step in fan]
    assert [(step.index, step.token_ids) for step in steps] == [(index, [100 + index] * 2) for index in range(2, 6)]
    assert [step.texts for step in steps] == [[f" {100 + index}"] * 2 for index in range(2, 6)]
    assert fan.first_differences == [None, None]


async def test_a_sibling_that_differs_from_what_was_read_fails(client: Client, engine: Callable[..., Any]) -> None:
    with anyio.fail_after(PATIENCE):
        async with (
            engine(restarting([100, 101, 102, 203, 204, 205]), schema="2.5"),
            client.trace("tiny", "x", live={"alpha": 0.0}) as trace,
        ):
            await trace.until_done()
            steps = []
            async with await trace.fork([{"alpha": 0.0}, {"alpha": 1.0}], at=2) as fan:
                with pytest.raises(tracewire.TextChanged):
                    async for step in fan:
                        steps.append(step)  # noqa: PERF401
    # The other one was read to its end.
    assert [step.token_ids for step in steps] == [[102, 102], [103, 103], [104, None], [105, None]]


class Played:
    """A sibling that yields items as they are."""

    id = "played"

    def __init__(self, *items: Any) -> None:
        self._items = iter(items)

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        raise StopAsyncIteration


def _read(index: int, token_ids: list[int], text: str, **fields: Any) -> Output:
    return Output(attempt=1, seq=0, index=index, token_ids=token_ids, text=text, **fields)


def _gap(token_ids: list[int], text: str) -> Gap:
    held = HeldChoice(0, 0, token_ids, text, None, None, {})
    stored = Stored(1, 0, schema_text(), encode(Snapshot(attempt=1, seq=0, choices=[held])))
    return Gap("played", EntryGap("start", "1-0", stored), None)


@pytest.mark.parametrize(
    "items",
    [
        [_read(0, [1], "a"), _gap([1, 2, 3], "abc"), _read(3, [4], "d")],
        [_gap([1], "a"), _read(1, [2, 3], "bc"), _read(3, [4], "d")],
        [_read(0, [1, 2], "ab"), Restarted(2, 0), _read(0, [1, 2, 3], "abc"), _read(3, [4], "d")],
        [_read(0, [1], "ab"), Restarted(2, 0), _read(0, [1], "a"), _read(1, [2, 3, 4], "bcd")],
        [_read(0, [1], ""), Restarted(2, 0), _read(0, [1], "a"), _read(1, [2, 3, 4], "bcd")],
        [_read(0, [1], "a"), Restarted(2, 0), _gap([1, 2], "ab"), _read(2, [3, 4], "cd")],
    ],
)
async def test_the_tokens_of_a_sibling_stand_at_their_indices(items: list[Any]) -> None:
    sibling = _Sibling(Played(*items))  # type: ignore[arg-type]
    found = [await sibling.reach(index) for index in range(5)]
    assert sibling.error is None
    assert [one and one[0] for one in found] == [1, 2, 3, 4, None]
    assert "".join(one[1] for one in found if one) == "abcd"


async def test_a_start_that_is_cancelled_cancels_all_siblings(client: Client, engine: Callable[..., Any]) -> None:
    running: list[str] = []
    going = anyio.Event()

    async def waits(stage: Stage) -> None:
        if not stage.submission.invokes[0].forced_tokens:
            await script(stage)
            return
        await stage.accept()
        running.append(stage.trace)
        going.set()
        await anyio.sleep_forever()

    with anyio.fail_after(PATIENCE):
        async with engine(waits, schema="2.5"), client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
            await trace.until_done()
            fan = await trace.fork([{"alpha": 0.0}, {"alpha": 1.0}], at=2)
            # The second one never starts.
            fan.traces[1].start = anyio.sleep_forever  # type: ignore[method-assign]
            async with anyio.create_task_group() as group:
                group.start_soon(fan.start)
                await going.wait()
                group.cancel_scope.cancel()
            assert running == [fan.traces[0].id]
            async with client.subscribe(running[0]) as events:
                (end,) = [event async for event in events if isinstance(event, tracewire.Final)]
    assert end.status == "cancelled"


@pytest.mark.usefixtures("registered")
async def test_what_cannot_be_forked_is_named(client: Client, engine: Callable[..., Any]) -> None:
    with anyio.fail_after(PATIENCE):
        async with engine(script, schema="2.5"), client.trace("tiny", "x", live={"alpha": 0.0}) as trace:
            await trace.until_done()
            for live, said in (([], "live: "), ({"alpha": 1.0}, "live: "), ([5], r"live\[0\]: ")):
                with pytest.raises(ValueError, match=said):
                    await trace.fork(live)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="at: "):
                await trace.fork([{}], at=99)
            with pytest.raises(tracewire.TraceRejected, match="beta"):
                await trace.fork([{"beta": 1.0}], at=1)
            await settled(client._session.open_bus())
            with pytest.raises(tracewire.InvalidRecording):
                await client.fork(trace.id, [{}])


def test_the_distance_is_a_lower_bound() -> None:
    half = math.log(0.5)
    assert _distance({1: half, 2: half}, {1: half, 2: half}) == 0.0
    assert _distance({1: 0.0}, {1: math.log(0.25)}) == pytest.approx(0.375)
    assert _distance(None, {1: 0.0}) is None
    assert "2 siblings" in repr(Fan([None, None], 0, [{}, {}]))  # type: ignore[list-item]
