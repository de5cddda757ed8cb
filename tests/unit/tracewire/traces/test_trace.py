"""What a service sees: traces, subscriptions and states against a scripted engine on a real Redis."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import checkpoint

import tracewire
from tests.support.bus_engine import Stage, engine_info, tiny
from tests.support.clients import collected, texts, watch
from tests.support.tasks import in_another_task
from tracewire import Client, Overloaded, Trace, TraceRejected, TracewireError, UnknownTrace
from tracewire_bus.bus import Bus, QueueFull
from tracewire_bus.wire.messages import Failure, Invoke, Submission
from tracewire_bus.wire.packing import unpack

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 60


async def test_a_handle_that_is_closed_while_it_is_submitted_leaves_no_trace_behind(
    client: Client, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting, go_on = anyio.Event(), anyio.Event()
    submit = Bus.submit

    async def slowly(self: Bus, *given: Any, **options: Any) -> Any:
        submitting.set()
        await go_on.wait()
        return await submit(self, *given, **options)

    monkeypatch.setattr(Bus, "submit", slowly)
    async with Bus.open(redis_url, prefix=prefix) as bus:
        await bus.registry.register(engine_info(), ttl_s=600)
        trace = client.trace("tiny", "hello")
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:

                async def start() -> None:
                    with pytest.raises(tracewire.TraceClosed, match="was closed while it was submitted"):
                        await trace.start()

                group.start_soon(start)
                await submitting.wait()
                await trace.aclose()
                go_on.set()
        assert await bus.queue.waiting("tiny") == 0
        assert await bus.records.ended(trace.id)


async def test_an_overloaded_model_refuses_at_once_and_takes_more_later(
    client: Client, redis_url: str, prefix: str
) -> None:
    info = engine_info(queue_limit=2)
    async with Bus.open(redis_url, prefix=prefix) as bus:
        # Serves, but has its hands full.
        await bus.registry.register(info, ttl_s=600)
        for _ in range(2):
            await client.trace("tiny", "hello").start()
        refused = client.trace("tiny", "hello")
        with pytest.raises(Overloaded, match="2 submissions wait for the model 'tiny', the limit is 2") as caught:
            await refused.start()
        assert isinstance(caught.value, TracewireError)
        assert (caught.value.model, caught.value.waiting, caught.value.limit) == ("tiny", 2, 2)
        assert 0.1 <= caught.value.retry_after <= 60
        with pytest.raises(UnknownTrace):
            await client.get_state(refused.id)
        # Another service has not had its share.
        async with tracewire.connect(redis_url, prefix=prefix, name="another") as other:
            await other.trace("tiny", "hello").start()
        assert len(await bus.queue.take("tiny", info.engine, 3, 0)) == 3
        await refused.start()
        (entry,) = await bus.queue.take("tiny", info.engine, 3, 0)
        assert entry.trace == refused.id
        await refused.aclose()


async def test_outputs_come_one_by_one_and_the_result_is_folded(client: Client, engine: Callable[..., Any]) -> None:
    async with engine() as serving:
        model = await client.models.get("tiny")
        async with client.trace(model, "hello", watch(direction=2.0), max_tokens=3, temperature=0.0) as trace:
            accepted = await trace.accepted()
            assert accepted.engine == serving.info.engine
            items = await collected(trace)
            assert texts(items) == ["one", " two", " three"]
            assert [item.delta for item in items] == [{"scores": [0.0]}, {"scores": [0.5]}, {"scores": [1.0]}]
            assert [item.id for item in items] == ["1-1", "1-2", "1-3"]
            assert items[-1].finish_reason == "length"
            result = await trace.result()
            final = await trace.final()
            assert (final.status, final.usage, final.manifest) == ("finished", result.usage, result.manifest)
    assert result.text == "one two three"
    assert result.token_ids == [100, 101, 102]
    assert result.saves == {"scores": [0.0, 0.5, 1.0]}
    assert result.status == "finished" == trace.status
    assert result.usage.completion_tokens == 3
    assert [entry.name for entry in result.manifest] == ["scores"]
    assert result.finish_reason == "length"
    assert result.invokes[0].choices[0].saves is result.saves
    assert "3 tokens, saves scores" in repr(result)
    submission = serving.taken[0]
    assert submission.trace == trace.id
    assert submission.invokes[0].prompt == "hello"
    assert submission.invokes[0].sampling == {"max_tokens": 3, "temperature": 0.0}
    assert submission.block is not None
    assert unpack(submission.block.variables) == {"direction": 2.0}
    assert submission.client


async def test_the_result_alone_before_beside_and_after_iterating(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        async with client.trace("tiny", "hello") as alone:
            first = await alone.result()
            assert await alone.result() is first
            with pytest.raises(TracewireError, match="has read the outputs"):
                async for _ in alone:
                    pass
        async with client.trace("tiny", "hello") as after:
            assert len(await collected(after)) == 3
            assert (await after.result()).saves == first.saves
            assert await collected(after) == []
        async with client.trace("tiny", "hello") as left:
            async for _ in left:
                break
            assert (await left.result()).saves == first.saves
            assert texts(await collected(left)) == [" two", " three"]
        async with client.trace("tiny", "hello") as late:
            await late.accepted()
            assert texts(await collected(late)) == ["one", " two", " three"]


async def test_the_result_beside_an_iteration_takes_nothing_from_it(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("a", {"x": 1})
        await gate.wait()
        for _ in range(50):
            await stage.save("b", {"x": 2})
        await stage.final()

    items: list[Any] = []
    results: list[Any] = []

    async def iterate(trace: Trace) -> None:
        async for output in trace:
            items.append(output)
            gate.set()
            await checkpoint()

    async def ask(trace: Trace) -> None:
        results.append(await trace.result())

    async with engine(script), client.trace("tiny", "hello") as trace:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(iterate, trace)
                for _ in range(3):
                    group.start_soon(ask, trace)
    assert [item.index for item in items] == list(range(51))
    assert len(results) == 3
    assert all(result is results[0] for result in results)
    assert results[0].saves == {"x": [1] + [2] * 50}


async def test_an_iteration_that_begins_while_a_result_is_waited_for_gets_all(
    client: Client, engine: Callable[..., Any]
) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await gate.wait()
        await tiny(stage)

    async with engine(script), client.trace("tiny", "hello") as trace:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(trace.result)
                await checkpoint()
                items = aiter(trace)
                gate.set()
                assert [item.text async for item in items] == ["one", " two", " three"]


async def test_a_trace_is_started_once(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        trace = client.trace("tiny", "hello")
        assert "not started" in repr(trace)
        await trace.start()
        await trace.start()
        assert (await trace.result()).text == "one two three"
        assert "finished" in repr(trace)
        await trace.aclose()
        await trace.aclose()
        assert (await trace.result()).text == "one two three"


async def test_a_detached_trace_that_was_closed_early_says_so(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await gate.wait()
        await stage.final()

    async with engine(script):
        async with client.trace("tiny", "hello", detach=True) as trace:
            await trace.accepted()
        with pytest.raises(TracewireError, match=r"closed before its end was read.*subscribe"):
            await trace.result()
        never = client.trace("tiny", "hello")
        await never.aclose()
        with pytest.raises(TracewireError, match="is closed"):
            await never.start()
        # It goes on for the others.
        gate.set()
        events = await collected(client.subscribe(trace.id))
        assert events[-1].status == "finished"


async def test_closing_a_trace_ends_a_wait_in_another_task(client: Client, engine: Callable[..., Any]) -> None:
    started, raised = anyio.Event(), []

    async def script(stage: Stage) -> None:
        await stage.accept()
        started.set()

    async def wait(trace: Trace) -> None:
        with pytest.raises(TracewireError, match="closed before its end") as caught:
            await trace.result()
        raised.append(caught.value)

    async with engine(script), client.trace("tiny", "hello") as trace, anyio.create_task_group() as group:
        group.start_soon(wait, trace)
        await started.wait()
        await trace.aclose()
    assert raised


async def test_the_same_id_twice_runs_once(client: Client, engine: Callable[..., Any]) -> None:
    async with engine() as serving:
        async with (
            client.trace("tiny", "hello", trace_id="same") as first,
            client.trace("tiny", "hello", trace_id="same") as second,
        ):
            assert (await first.result()).saves == (await second.result()).saves
        assert len(serving.taken) == 1


async def test_many_traces_at_once_do_not_mix(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(20):
            await stage.save(f"{stage.submission.invokes[0].prompt}/", {"own": [stage.trace, number]})
        await stage.final()

    async def one(number: int) -> None:
        async with client.trace("tiny", f"p{number}") as trace:
            items = await collected(trace)
            result = await trace.result()
        assert texts(items) == [f"p{number}/"] * 20
        assert result.saves["own"] == [[trace.id, step] for step in range(20)]

    async with engine(script), anyio.create_task_group() as group:
        for number in range(40):
            group.start_soon(one, number)


async def test_of_many_traces_that_are_started_at_once_the_first_are_sent_while_the_others_are_made(
    client: Client, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    made: list[str] = []
    connections = client._session.open_bus()._connections
    usual = connections._send

    async def send(calls: list[Any]) -> None:
        turns.append(len(made))
        await usual(calls)

    find = client._session.models.find

    async def finding(*args: Any) -> Any:
        made.append("")
        return await find(*args)

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final()

    async with engine(script), anyio.create_task_group() as group:
        await client.models.get("tiny")
        await client._session.presence.lease()
        # What the first of them would ask for all.
        await client._session.open_bus().memory.prefetch()
        monkeypatch.setattr(connections, "_send", send)
        monkeypatch.setattr(client._session.models, "find", finding)
        cancelled = anyio.CancelScope()

        async def one(number: int) -> None:
            with cancelled if number == 20 else nullcontext():
                async with client.trace("tiny", "p") as trace:
                    await trace.result()

        for number in range(40):
            group.start_soon(one, number)
        # One that waits for its turn may go: the others get theirs.
        await checkpoint()
        cancelled.cancel()
    assert 0 < turns[0] <= 8
    assert len(made) == 39


async def test_a_consumer_that_lags_misses_nothing(client: Client, engine: Callable[..., Any]) -> None:
    published = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        async with anyio.create_task_group() as group:
            for number in range(1500):
                group.start_soon(stage.save, "x", {"n": number})
        await stage.final()
        published.set()

    async with engine(script), client.trace("tiny", "hello") as trace:
        await trace.accepted()
        with anyio.fail_after(PATIENCE):
            await published.wait()
        items = await collected(trace)
        assert [item.index for item in items] == list(range(1500))
        assert (await trace.result()).saves["n"] == list(range(1500))


async def rejecting(stage: Stage) -> None:
    await stage.final("rejected", Failure(type="ValueError", message="too hot", field="sampling.temperature"))


@pytest.mark.parametrize("ask", ["accepted", "item", "result"])
async def test_a_rejection_is_raised_wherever_it_is_met_first(
    client: Client, engine: Callable[..., Any], ask: str
) -> None:
    async with engine(rejecting), client.trace("tiny", "hello", temperature=9) as trace:
        calls = {"accepted": trace.accepted, "item": trace.__anext__, "result": trace.result}
        with pytest.raises(TraceRejected, match=r"sampling\.temperature: too hot") as caught:
            await calls[ask]()
        assert caught.value.field == "sampling.temperature"
        assert caught.value.type == "ValueError"
        assert caught.value.trace_id == trace.id
        for call in calls.values():
            with pytest.raises(TraceRejected):
                await call()


@pytest.fixture
async def fixture_trace(client: Client, redis_url: str, prefix: str) -> AsyncIterator[Trace]:
    """A trace that is entered when a fixture is set up and left when it is torn down, by other tasks."""
    async with client.trace("tiny", "from a fixture", trace_id=None) as trace:
        yield trace


@pytest.mark.usefixtures("registered")
async def test_a_trace_of_a_fixture(fixture_trace: Trace, engine: Callable[..., Any]) -> None:
    async with engine():
        assert texts(await collected(fixture_trace)) == ["one", " two", " three"]
        assert (await fixture_trace.result()).saves == {"scores": [0.0, 0.5, 1.0]}


async def test_a_trace_entered_in_one_task_and_closed_in_another(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        trace = client.trace("tiny", "hello")
        await in_another_task(trace.__aenter__())
        first = await in_another_task(trace.__anext__())
        assert first.text == "one"
        with anyio.move_on_after(PATIENCE):
            # A scope around one step of it is no business of the next.
            assert (await anext(trace)).text == " two"
        assert (await in_another_task(trace.result())).text == "one two three"
        await in_another_task(trace.__aexit__(None, None, None))


async def test_a_trace_inside_an_async_generator(client: Client, engine: Callable[..., Any]) -> None:
    async def stream(number: int) -> AsyncIterator[str]:
        async with client.trace("tiny", f"hello {number}", watch) as trace:
            async for output in trace:
                assert isinstance(output, tracewire.Output)
                yield output.text

    async with engine():
        assert [text async for text in stream(1)] == ["one", " two", " three"]
        # Begun in one task, and closed by another as a web server does when its client goes away.
        left = stream(2)
        assert await in_another_task(left.__anext__()) == "one"
        await in_another_task(left.aclose())  # type: ignore[attr-defined]
        # Begun, and left to the garbage collector.
        dropped = stream(3)
        assert await anext(dropped) == "one"
        del dropped
        gc.collect()
        assert [text async for text in stream(4)] == ["one", " two", " three"]


async def test_a_cancelled_wait_loses_nothing(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await gate.wait()
        await stage.save("two", {"x": 2})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        assert (await anext(trace)).text == "one"
        for ask in (trace.__anext__, trace.result, trace.__anext__):
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
        gate.set()
        assert texts(await collected(trace)) == ["two"]
        assert (await trace.result()).saves == {"x": [1, 2]}


async def test_a_trace_is_left_when_its_task_is_cancelled(client: Client, engine: Callable[..., Any]) -> None:
    begun = anyio.Event()
    traces: list[Trace] = []

    async def script(stage: Stage) -> None:
        await stage.accept()

    async def follow() -> None:
        async with client.trace("tiny", "hello") as trace:
            traces.append(trace)
            await trace.accepted()
            begun.set()
            await trace.result()

    async with engine(script):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await begun.wait()
            group.cancel_scope.cancel()
        assert "closed" in repr(traces[0])


async def test_a_trace_that_was_left_says_that_it_was_cancelled(client: Client, engine: Any) -> None:
    async with engine():
        async with client.trace("tiny", "a") as trace:
            pass
        with pytest.raises(TracewireError, match="closed before its end was read: it was cancelled then"):
            await trace.result()


@pytest.mark.usefixtures("registered")
async def test_a_full_queue_forgets_nobody_elses_trace(client: Client, bus: Bus) -> None:
    """Of the same id, on another model."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="mine", detach=True) as trace:
        await bus.submit(Submission(trace="first", model="other", invokes=[Invoke(prompt="x")], client="c"), 1)
        with pytest.raises(QueueFull):
            await bus.submit(Submission(trace="mine", model="other", invokes=[Invoke(prompt="x")], client="c"), 1)
        assert await trace.steer(alpha=1.0) == 1
        assert await trace.cancel()


@pytest.mark.usefixtures("registered")
async def test_an_id_belongs_to_one_model(client: Client, bus: Bus) -> None:
    await bus.registry.register(engine_info("other"), ttl_s=600)
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="mine", detach=True) as trace:
        with pytest.raises(tracewire.TraceIdTaken, match="tiny") as caught:
            await client.trace("other", "hello", trace_id="mine").start()
        assert caught.value.trace_id == "mine"
        assert await bus.queue.waiting("other") == 0
        assert await bus.queue.waiting("tiny") == 1
        assert await trace.steer(alpha=1.0) == 1


@pytest.mark.usefixtures("registered")
async def test_a_submission_that_is_given_up_is_cancelled(client: Client, bus: Bus) -> None:
    """Its start was cancelled when it was queued already."""
    opened = client._session.open_bus()
    plain, scope = opened.submit, anyio.CancelScope()

    async def submit(*arguments: Any, **options: Any) -> bool:
        is_own = await plain(*arguments, **options)
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        return is_own

    opened.submit = submit  # type: ignore[method-assign]
    with anyio.fail_after(PATIENCE):
        trace = client.trace("tiny", "hello")
        with scope:
            async with trace:
                pytest.fail("it was not cancelled")
        assert await bus.queue.waiting("tiny") == 0
        assert (await client.get_state(trace.id)).status == "cancelled"


@pytest.mark.usefixtures("roomy")
async def test_closing_a_forgotten_trace_leaves_no_record(client: Client, bus: Bus) -> None:
    """An engine that was cut off closes what was ended from outside long ago."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        await bus.records.open(trace.id, "cut off")
        assert await bus.records.end(trace.id, "failed", Failure(type="EngineLost", message="lost"))
        record = bus.keys.record(trace.id)
        # As if its time were over.
        await bus.command("DEL", record)
        assert await bus.records.close(trace.id, 1) == []
        assert not await bus.command("EXISTS", record)
