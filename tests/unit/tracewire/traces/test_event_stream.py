"""The easy ways of reading: text, outputs, results and ends, of traces and of subscriptions."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, get_args

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tracewire import (
    AmbiguousResult,
    Client,
    Output,
    Prompt,
    SaveMissing,
    TextChanged,
    TraceFailed,
    UnknownTrace,
)
from tracewire.traces.event_stream import _Text
from tracewire_bus.events.subscription import Gap as EntryGap
from tracewire_bus.store.snapshots import Stored
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.messages import SHARED_INVOKE, DecodedShared, Failure, FirstToken, HeldChoice, Set, Snapshot
from tracewire_bus.wire.packing import wire

PATIENCE = 60


@pytest.fixture
async def client(embedded: str, prefix: str) -> AsyncIterator[Client]:
    """A client on the session's Redis."""
    async with tracewire.connect(embedded, prefix=prefix) as client:
        yield client


@pytest.fixture
def engine(embedded: str, prefix: str) -> Any:
    """Runs a scripted engine."""
    return lambda script=tiny, **info: BusEngine.running(embedded, prefix, script, engine_info(**info))


async def all_of(items: AsyncIterator[Any]) -> list[Any]:
    with anyio.fail_after(PATIENCE):
        return [item async for item in items]


# --- traces -----------------------------------------------------------------------------------------------------------


async def test_reading_a_trace_starts_it(client: Client, engine: Any) -> None:
    async with engine() as serving:
        assert await all_of(client.trace("tiny", "hello").text_stream()) == ["one", " two", " three"]
        assert (await client.trace("tiny", "hello").result()).text == "one two three"
        outputs = await all_of(client.trace("tiny", "hello").outputs())
        assert [type(one) for one in outputs] == [Output] * 3
        trace = client.trace("tiny", "hello")
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(trace.result)
        assert await trace.until_done() == "finished"
        assert len(serving.taken) == 4


async def test_how_it_ended_is_no_error(client: Client, engine: Any) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.final("failed", Failure(type="Test", message="no"))

    async with engine(script):
        trace = client.trace("tiny", "hello")
        assert await trace.until_done() == "failed"
        text = client.trace("tiny", "hello").text_stream()
        assert await anext(text) == "one"
        with pytest.raises(TraceFailed, match="no"):
            await anext(text)
        subscription = client.subscribe(trace.id)
        assert await subscription.until_done() == "failed"
        text = subscription.text_stream()
        assert await anext(text) == "one"
        with pytest.raises(TraceFailed, match="no"):
            await anext(text)
        with pytest.raises(TraceFailed) as caught:
            await client.subscribe(trace.id).result()
        assert caught.value.result is not None
        assert caught.value.result.text == "one"


async def test_the_text_of_one_of_several_choices(client: Client, engine: Any) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for text in ("a", "b"):
            for invoke in (0, 1):
                await stage.output(f"{text}{invoke}", invoke=invoke)
        await stage.final()

    async with engine(script):
        prompts = ["x", Prompt("y")]
        assert await all_of(client.trace("tiny", prompts=prompts).text_stream(invoke=1)) == ["a1", "b1"]
        assert await all_of(client.trace("tiny", prompts=prompts).text_stream(choice=0)) == ["a0", "b0"]
        with pytest.raises(AmbiguousResult, match=r"text_stream\(invoke=1, choice=0\)"):
            await all_of(client.trace("tiny", prompts=prompts).text_stream())


async def test_text_goes_on_where_a_trace_runs_again(client: Client, engine: Any) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one ")
        await stage.output("two ")
        await stage.restart("its engine died")
        await stage.accept()
        for text in ("o", "ne tw", "o three", " four"):
            await stage.output(text)
        await stage.final()

    async with engine(script):
        assert await all_of(client.trace("tiny", "x").text_stream()) == ["one ", "two ", "three", " four"]


async def test_text_that_differs_when_a_trace_runs_again_is_an_error(client: Client, engine: Any) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one ")
        await stage.restart("its engine died")
        await stage.accept()
        await stage.output("once")
        await stage.final()

    async with engine(script):
        text = client.trace("tiny", "x").text_stream()
        assert await anext(text) == "one "
        with pytest.raises(TextChanged) as caught, anyio.fail_after(PATIENCE):
            await anext(text)
        assert caught.value.length == 4


def test_text_that_was_trimmed_is_handed_out_from_the_state() -> None:
    held = HeldChoice(0, 0, [1, 2, 3], "one two three", None, None, {})
    stored = Stored(1, 3, schema_text(), encode(Snapshot(attempt=1, seq=3, choices=[held])))
    gap = tracewire.Gap("t", EntryGap("1-1", "1-3", stored), None)
    text = _Text("t", None, None)
    assert text.piece(Output(attempt=1, seq=1, text="one")) == "one"
    assert text.piece(gap) == " two three"
    assert text.piece(Output(attempt=1, seq=4, text=" four")) == " four"


@pytest.mark.parametrize(
    "again", [["one ", "two ", "three ", "four"], ["one two ", "three four"], ["one two three ", "four"]]
)
async def test_text_from_the_middle_goes_on_where_a_trace_runs_again(
    client: Client, engine: Any, again: list[str]
) -> None:
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for text in ("one ", "two "):
            await stage.output(text)
        await going.wait()
        await stage.output("three ")
        await stage.restart("its engine died")
        await stage.accept()
        for text in again:
            await stage.output(text, *[[] for _ in text.split()])
        await stage.final()

    async with engine(script), client.trace("tiny", "x") as trace:
        with anyio.fail_after(PATIENCE):
            outputs = trace.outputs()
            while (await anext(outputs)).text != "two ":
                pass
        async with client.subscribe(trace.id, since="now") as live, client.subscribe(trace.id, since="1-1") as later:
            going.set()
            assert "".join(await all_of(live.text_stream())) == "three four"
            assert "".join(await all_of(later.text_stream())) == "two three four"
            assert "".join(await all_of(trace.text_stream())) == "three four"


async def test_a_stream_from_the_middle_whose_trace_runs_again_before_it_had_a_piece(
    client: Client, engine: Any
) -> None:
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one ")
        await going.wait()
        await stage.restart("its engine died")
        await stage.accept()
        for text in ("one ", "two"):
            await stage.output(text)
        await stage.final()

    async with engine(script), client.trace("tiny", "x") as trace:
        await trace.accepted()
        await anext(trace.outputs())
        async with client.subscribe(trace.id, since="now") as live:
            going.set()
            assert await all_of(live.text_stream()) == ["one ", "two"]


def _gap(text: str, count: int, *, attempt: int = 1) -> tracewire.Gap:
    held = HeldChoice(0, 0, list(range(count)), text, None, None, {})
    stored = Stored(attempt, count, schema_text(), encode(Snapshot(attempt=attempt, seq=count, choices=[held])))
    return tracewire.Gap("t", EntryGap("1-1", f"{attempt}-{count}", stored), None)


def _output(index: int, text: str, *, attempt: int = 1) -> Output:
    return Output(attempt=attempt, seq=index + 1, index=index, token_ids=[index], text=text)


def test_text_from_the_middle_goes_on_behind_trimmed_events() -> None:
    text = _Text("t", None, None)
    assert text.piece(_output(2, "na")) == "na"
    # "na" is in the state twice: the third token's is the second one.
    assert text.piece(_gap("banana split", 4)) == " split"
    assert text.piece(_output(4, "!")) == "!"


def test_text_from_the_middle_goes_on_where_the_new_attempts_events_were_trimmed() -> None:
    text = _Text("t", None, None)
    assert text.piece(_output(2, "two ")) + text.piece(_output(3, "three ")) == "two three "
    # The state ends before the first token that was handed out.
    assert text.piece(_gap("zero one ", 2, attempt=2)) == ""
    assert text.piece(_output(2, "two ", attempt=2)) == ""
    assert text.piece(_output(3, "three ", attempt=2)) == ""
    assert text.piece(_output(4, "four", attempt=2)) == "four"


async def test_a_handle_shows_what_its_trace_does(client: Client, engine: Any) -> None:
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.steered()
        await stage.output("two")
        await going.wait()
        await stage.final()

    async with engine(script):
        trace = client.trace("tiny", "x", trace_id="ab12", live={"alpha": 1.0})
        assert repr(trace) == "<Trace ab12 of tiny: not started>"
        await trace.start()
        assert repr(trace) == "<Trace ab12 of tiny: queued>"
        await trace.accepted()
        assert repr(trace) == "<Trace ab12 of tiny: running>"
        assert await trace.steer(alpha=2.0) == 1
        assert (await trace.get_live()).values == {"alpha": 2.0}
        items = trace.outputs()
        await anext(items)
        await anext(items)
        assert repr(trace) == "<Trace ab12 of tiny: running, 2 tokens, steered to version 1>"
        going.set()
        await trace.result()
        assert repr(trace) == "<Trace ab12 of tiny: finished, 2 tokens, steered to version 1>"


def test_the_first_token_of_a_change() -> None:
    steered = tracewire.Steered(attempt=1, seq=3, version=1, first=[FirstToken(0, 0, 5), FirstToken(1, 2, 7)])
    assert (steered.first_token(), steered.first_token(1, 2), steered.first_token(invoke=1)) == (5, 7, None)


# --- subscriptions ----------------------------------------------------------------------------------------------------


async def saving(stage: Stage) -> None:
    await stage.accept()
    await stage.save("one", {"projection": 1.5})
    await stage.save("two", {"projection": 2.5})
    await stage.final()


async def test_a_subscription_waits_for_the_result_beside_its_iteration(client: Client, engine: Any) -> None:
    async with engine(saving), client.trace("tiny", "x") as trace, client.subscribe(trace.id) as subscription:
        found: list[Any] = []

        async def wait() -> None:
            found.extend([await subscription.result(), await subscription.until_done()])

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            assert [one.text async for one in subscription.outputs()] == ["one", "two"]
        assert (found[0].text, found[0].saves, found[1]) == ("onetwo", {"projection": [1.5, 2.5]}, "finished")
        assert (await client.subscribe(trace.id, since="now").result()).saves == {"projection": [1.5, 2.5]}
        assert (await client.subscribe(trace.id, names={"nothing"}).result()).saves == {}
        assert await client.subscribe(trace.id, since="now").until_done() == "finished"


async def test_until_done_waits_for_the_end(client: Client, engine: Any) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await gate.wait()
        await stage.final()

    async with engine(script), client.trace("tiny", "x") as trace:
        await trace.accepted()
        status: list[str] = []

        async def wait() -> None:
            status.append(await client.subscribe(trace.id).until_done())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert status == []
            gate.set()
        assert status == ["finished"]


async def test_a_subscription_is_checked_before_an_answer_begins(
    client: Client, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for wait in ("start", "check", "result", "until_done"):
        with pytest.raises(UnknownTrace):
            await getattr(client.subscribe("nobody-s"), wait)()
    async with engine(saving), client.trace("tiny", "x") as trace:
        running = client.subscribe(trace.id, names={"projction"})
        await trace.result()
        await running.start()
        await client.subscribe(trace.id, names={"projection"}).check()
        await client.subscribe(trace.id).check()
        with pytest.raises(SaveMissing, match=r"did you mean 'projection'\?"):
            await running.check()


async def test_a_large_array_of_what_is_shared_is_loaded(client: Client, engine: Any) -> None:
    array = np.arange(6, dtype=np.float32)

    async def script(stage: Stage) -> None:
        await stage.accept()
        delta = Set(path=("rows",), value=wire([await stage.store(array, "rows")]))
        await stage.publish(DecodedShared(attempt=stage.attempt, seq=stage.seq, invoke=SHARED_INVOKE, deltas=[[delta]]))
        await stage.final()

    async with engine(script), client.trace("tiny", "x") as trace:
        (item,) = [item async for item in trace]
        assert isinstance(item, tracewire.Shared)
        (found,) = item.delta["rows"]
        assert (await found.load()).tolist() == array.tolist()


# --- kinds of events --------------------------------------------------------------------------------------------------


def test_each_event_has_a_type_of_its_own() -> None:
    events = get_args(tracewire.Event)
    assert len(events) >= 10
    assert all(getattr(tracewire, event.__name__) is event for event in events)
    assert [event.type for event in events] == [
        re.sub(r"\B([A-Z])", r"_\1", event.__name__).lower() for event in events
    ]
    assert not issubclass(tracewire.Shared, tracewire.Output)
