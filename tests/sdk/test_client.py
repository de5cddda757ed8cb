"""What a service sees: traces, subscriptions and states against a scripted engine on a real Redis."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint

import tracewire
from tests.support.bus_engine import Script, ScriptedEngine, Stage, engine_info, tiny
from tests.support.redis.proxy import proxy
from tracewire import (
    AmbiguousResult,
    BrokenStream,
    Client,
    ConnectError,
    EventsLost,
    InterventionError,
    Overloaded,
    Prompt,
    StateMismatch,
    Subscription,
    Trace,
    TraceFailed,
    TraceRejected,
    TracewireError,
    UnknownModel,
    UnknownModulePath,
    UnknownTrace,
    UntransportableVariable,
    intervention,
)
from tracewire_bus.bus import Bus
from tracewire_bus.domain.fold import Fold
from tracewire_bus.transport.errors import BusUnavailable
from tracewire_bus.wire import messages
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Append, Delete, Failure, Final, Manifest, Set
from tracewire_bus.wire.packing import unpack

#: Nothing here takes longer; a test that would hang fails instead.
PATIENCE = 20


@pytest.fixture
def engine(redis_url: str, prefix: str) -> Callable[..., Any]:
    """Runs a scripted engine: `async with engine(script):`."""

    def running(script: Script = tiny, **info: Any) -> Any:
        return ScriptedEngine.running(redis_url, prefix, script, engine_info(**info))

    return running


async def collected(source: Any) -> list[Any]:
    with anyio.fail_after(PATIENCE):
        return [item async for item in source]


def texts(items: list[Any]) -> list[str]:
    return [item.text for item in items if isinstance(item, tracewire.Output)]


@intervention
def watch(model, tracer, live, direction=1.0):
    scores = [].save()
    for step in tracer.iter[:]:
        scores.append(model.model.layers[2].output[0].sum().item() * direction)


# --- connecting -------------------------------------------------------------------------------------------------------


async def test_connect_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEWIRE_URL", raising=False)
    with pytest.raises(ConnectError, match="TRACEWIRE_URL"):
        async with tracewire.connect():
            pass


async def test_connect_takes_the_url_of_the_environment(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEWIRE_URL", redis_url)
    async with tracewire.connect() as client:
        assert client.url == redis_url
        assert await client.models.list() == []


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "http://example.org", "nonsense"])
async def test_connect_says_when_nothing_answers(url: str) -> None:
    with pytest.raises(ConnectError, match="cannot connect"), anyio.fail_after(PATIENCE):
        async with tracewire.connect(url):
            pass


async def test_connections_that_nobody_answers_do_not_hold_up_connecting(embedded: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as through:
        through.served = 1
        with anyio.fail_after(20):
            async with tracewire.connect(through.url) as client:
                assert await client.models.list() == []


async def test_connecting_can_be_given_up_at_any_moment(
    embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.bus._WARM_S", 1000.0)
    before = asyncio.all_tasks()
    async with proxy(embedded, tmp_path) as through:
        through.served = 1
        opened = anyio.Event()
        warm = Bus.warm

        async def noted(self: Bus) -> None:
            opened.set()
            await warm(self)

        monkeypatch.setattr(Bus, "warm", noted)
        async with anyio.create_task_group() as group:

            async def connect() -> None:
                async with tracewire.connect(through.url):
                    raise AssertionError("it was given up")

            group.start_soon(connect)
            await opened.wait()
            group.cancel_scope.cancel()
        assert not [task for task in asyncio.all_tasks() - before if task.get_name().startswith("tracewire")]


async def test_embedded_is_shared_by_its_url_and_leaves_nothing() -> None:
    async with tracewire.connect("embedded://") as client:
        path = client.url.removeprefix("unix://")
        assert os.path.exists(path)
        async with ScriptedEngine.running(client.url, "tw", tiny), tracewire.connect(client.url) as other:
            async with other.trace("tiny", "hello", max_tokens=3) as trace:
                assert (await trace.result()).text == "one two three"
            assert (await client.get_state(trace.id)).text == "one two three"
    assert not os.path.exists(path)
    assert not os.path.exists(os.path.dirname(path))


async def test_leaving_the_client_leaves_no_task_no_connection_and_no_thread(
    redis_url: str, prefix: str, engine: Callable[..., Any]
) -> None:
    import redis.asyncio

    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"scores": 0})
        await gate.wait()

    async with redis.asyncio.Redis.from_url(redis_url) as observer, engine(script):

        async def connections() -> set[str]:
            return {each["id"] for each in await observer.client_list()}

        await observer.ping()
        async with tracewire.connect(redis_url, prefix=prefix) as warm, warm.trace("tiny", "hello") as trace:
            # The engine has opened all its connections then.
            await anext(trace)
        tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
        before = await connections()
        async with tracewire.connect(redis_url, prefix=prefix) as client:
            # Traces and subscriptions in every state, none of them closed.
            followed = client.trace("tiny", "hello")
            await followed.start()
            assert (await anext(followed)).text == "one"
            idle = client.trace("tiny", "hello")
            await idle.start()
            subscriptions = [client.subscribe(followed.id) for _ in range(20)]
            for subscription in subscriptions:
                assert isinstance(await anext(subscription), tracewire.Accepted)
            during = await connections()
            assert 1 <= len(during - before) <= 4, "connections do not grow with subscriptions"
        left = {task for task in asyncio.all_tasks() - tasks if "ScriptedEngine" not in task.get_name()}
        assert not left
        assert set(threading.enumerate()) <= threads
        with anyio.fail_after(PATIENCE):
            # A closed socket is seen by the server in its own time.
            while await connections() & (during - before):
                await checkpoint()
        with pytest.raises(ConnectError, match="closed"):
            await anext(subscriptions[0])
        with pytest.raises(ConnectError, match="closed"):
            await followed.result()
        gate.set()


async def test_what_the_body_raises_comes_out_as_it_is(redis_url: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with tracewire.connect(redis_url):
            raise KeyError("mine")


async def test_a_closed_client_says_so(redis_url: str) -> None:
    async with tracewire.connect(redis_url) as client:
        assert "closed" not in repr(client)
    assert "closed" in repr(client)
    with pytest.raises(ConnectError, match="the client is closed"):
        await client.models.list()
    with pytest.raises(ConnectError, match="the client is closed"):
        client.trace("tiny", "hello")
    with pytest.raises(ConnectError, match="the client is closed"):
        client.subscribe("any")


# --- models -----------------------------------------------------------------------------------------------------------


async def test_models_lists_what_live_engines_serve(client: Client, engine: Callable[..., Any]) -> None:
    assert await client.models.list() == []
    async with engine(running=2), engine(running=3), engine(model="other", dtype="float32"):
        found = {info.name: info for info in await client.models.list()}
        assert set(found) == {"tiny", "other"}
        assert len(found["tiny"].engines) == 2
        assert (found["tiny"].capacity, found["tiny"].running) == (32, 5)
        assert found["tiny"].layer_count == 4
        assert found["other"].dtype == "float32"
    assert await client.models.list() == []


async def test_a_models_queue_limit_is_the_most_that_an_engine_says(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(queue_limit=5), engine(queue_limit=7):
        assert (await client.models.list())[0].queue_limit == 7
        async with engine():
            assert (await client.models.list())[0].queue_limit == 0


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


async def test_an_unknown_model_is_refused_at_once_naming_those_that_exist(
    client: Client, engine: Callable[..., Any]
) -> None:
    with pytest.raises(UnknownModel, match="no engine is registered at all"):
        await client.models.get("tiny")
    async with engine() as serving:
        with pytest.raises(UnknownModel, match="no engine serves the model 'tyni'; served now: 'tiny'") as caught:
            await client.models.get("tyni")
        assert caught.value.available == ["tiny"]
        with pytest.raises(UnknownModel):
            async with client.trace("tyni", "hello"):
                pass
        assert serving.taken == []


async def test_a_model_can_be_waited_for(client: Client, engine: Callable[..., Any]) -> None:
    found: list[tracewire.Model] = []

    async def wait() -> None:
        found.append(await client.models.get("tiny", timeout=PATIENCE))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        async with engine():
            with anyio.fail_after(PATIENCE):
                while not found:
                    await checkpoint()
    assert found[0].name == "tiny"


async def test_waiting_for_a_model_ends(client: Client) -> None:
    with pytest.raises(UnknownModel, match=r"after 0\.01 s"):
        await client.models.get("tiny", timeout=0.01)


async def test_a_model_prints_its_tree_and_names_the_nearest_path(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        model = await client.models.get("tiny")
    assert model.name == "tiny"
    assert model.info.hidden_size == 8
    assert "(0-3): 4 x LlamaDecoderLayer" in repr(model)
    assert model.model.layers[2].mlp.path == "model.layers.2.mlp"
    with pytest.raises(AttributeError, match="mlp"):
        _ = model.model.layers[2].mpl
    with pytest.raises((AttributeError, LookupError)):
        _ = model.model.layers[9]


# --- a trace ----------------------------------------------------------------------------------------------------------


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


async def test_everything_that_a_submission_can_say(client: Client, engine: Callable[..., Any]) -> None:
    live = {"alpha": 0.5, "direction": torch.ones(2, dtype=torch.bfloat16)}
    async with engine() as serving:
        async with client.trace(
            "tiny",
            prompts=["text", [1, 2], torch.tensor([3, 4]), [{"role": "user", "content": "hi"}], Prompt("own", n=2)],
            block=watch.block(),
            live=live,
            deadline=timedelta(minutes=2),
            priority=-3,
            detach=True,
            trace_id="my:trace-1",
            temperature=np.float32(0.5),
            stop=("a", "b"),
            logit_bias={5: 1.0},
        ) as trace:
            await trace.result()
        submission = serving.taken[0]
    assert trace.id == submission.trace == "my:trace-1"
    invokes = submission.invokes
    assert [(each.prompt, each.token_ids, each.messages) for each in invokes] == [
        ("text", None, None),
        (None, [1, 2], None),
        (None, [3, 4], None),
        (None, None, [{"role": "user", "content": "hi"}]),
        ("own", None, None),
    ]
    shared = {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {5: 1.0}}
    assert invokes[0].sampling == shared
    assert invokes[4].sampling == {**shared, "n": 2}
    assert (submission.deadline_s, submission.priority, submission.detach) == (120.0, -3, True)
    values = unpack(submission.live)
    assert values["alpha"] == 0.5
    assert values["direction"].dtype.name == "bfloat16"


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


async def test_the_state_of_a_trace_while_it_is_read(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(), client.trace("tiny", "hello") as trace:
        assert trace.state().saves == {}
        seen = []
        async for output in trace:
            state = trace.state()
            seen.append((state.text, len(state.saves["scores"]), state.status))
            state.saves["scores"].clear()
            assert state.position == output.id
        assert seen == [("one", 1, None), ("one two", 2, None), ("one two three", 3, None)]
        assert trace.state().finished


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


async def test_the_first_traces_of_a_client_share_its_lease(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final()

    bus = client._session.open_bus()
    usual = bus.leases.renew
    asked: list[str] = []

    async def hold(lease: str, seconds: float) -> None:
        asked.append(lease)
        await usual(lease, seconds)
        # Whatever else renews it.
        bus.leases.renew = usual  # type: ignore[method-assign]

    bus.leases.renew = hold  # type: ignore[method-assign]
    async with engine(script), anyio.create_task_group() as group:
        traces = [client.trace("tiny", "p") for _ in range(8)]
        for trace in traces:
            group.start_soon(trace.start)
    (lease,) = {trace._submission.lease for trace in traces}
    assert asked == [lease]
    assert await bus.command("KEYS", bus.keys.lease("*")) == [bus.keys.lease(lease).encode()]
    for trace in traces:
        await trace.aclose()


async def test_a_lease_that_is_asked_for_in_vain_is_asked_for_again(client: Client) -> None:
    presence, bus = client._session.presence, client._session.open_bus()
    asked: list[str] = []
    usual = bus.leases.renew

    async def hold(lease: str, _: float) -> None:
        asked.append(lease)
        await checkpoint()
        raise BusUnavailable("away")

    async def fail() -> None:
        with pytest.raises(BusUnavailable, match="away"):
            await presence.lease()

    bus.leases.renew = hold  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(fail)
    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await presence.lease()

    async def held(lease: str, seconds: float) -> None:
        bus.leases.renew = usual  # type: ignore[method-assign]
        scope.cancel()
        await anyio.sleep_forever()

    bus.leases.renew = held  # type: ignore[method-assign]
    found: list[str] = []

    async def get() -> None:
        found.append(await presence.lease())

    async with anyio.create_task_group() as group:
        group.start_soon(cancelled)
        group.start_soon(get)
        group.start_soon(get)
    assert {*asked, *found} == {found[0]}
    assert await bus.command("KEYS", bus.keys.lease("*")) == [bus.keys.lease(found[0]).encode()]


async def test_of_many_traces_that_are_started_at_once_the_first_are_sent_while_the_others_are_made(
    client: Client, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = []
    made: list[str] = []
    connections = client._session.open_bus()._connections
    usual = connections._travel

    async def travel(calls: list[Any]) -> None:
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
        monkeypatch.setattr(connections, "_travel", travel)
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


async def test_a_burst_reads_what_is_old_once(client: Client, engine: Callable[..., Any]) -> None:
    bus = client._session.open_bus()
    asked: list[str] = []
    engines, memory = bus.registry.list, bus.memory.usage

    async def counted_engines() -> Any:
        asked.append("engines")
        return await engines()

    async def counted_memory() -> Any:
        asked.append("memory")
        return await memory()

    bus.registry.list, bus.memory.usage = counted_engines, counted_memory  # type: ignore[method-assign]

    async def start(model: str) -> None:
        try:
            await client.trace(model, "p", detach=True).start()
        except UnknownModel:
            asked.append("unknown")

    async with engine():
        for model in ("tiny", "nobody's"):
            client._session.models.forget()
            bus.memory._left.forget()
            asked.clear()
            async with anyio.create_task_group() as group:
                for _ in range(50):
                    group.start_soon(start, model)
            if model == "tiny":
                assert asked == ["engines", "memory"]
            else:
                # Those that do not find it look once more, together as they come.
                assert asked.count("unknown") == 50
                assert asked.count("engines") < 10


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


# --- deltas -----------------------------------------------------------------------------------------------------------


async def test_the_delta_of_an_output_by_name(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        first = [Set(path=("xs",), value=[1]), Set(path=("table",), value={"a": 1, "in": {"b": [1]}})]
        await stage.output("a", first, [Append(path=("xs",), items=[2, 3])])
        await stage.output(
            "b",
            [Append(path=("xs",), items=[[4]]), Set(path=("table", "in", "c"), value=5), Set(path=("v",), value=1.5)],
        )
        nested = [Append(path=("table", "in", "b"), items=[2]), Append(path=("xs", 3), items=[9])]
        await stage.output("c", nested, [Set(path=("xs", 0), value=7), Delete(path=("table", "a"))])
        await stage.output("d", [Delete(path=("v",))])
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        items = await collected(trace)
        result = await trace.result()
    assert items[0].delta == {"xs": [1, 2, 3], "table": {"a": 1, "in": {"b": [1]}}}
    assert items[1].delta == {"xs": [[4]], "table": {"in": {"c": 5}}, "v": 1.5}
    assert items[2].delta["table"] == {"in": {"b": [2]}}
    assert items[3].delta == {}
    assert len(items[0].deltas) == 2
    assert result.saves == {"xs": [7, 2, 3, [4, 9]], "table": {"in": {"b": [1, 2], "c": 5}}}
    # What was merged is a copy: reading it twice gives the same, and the state is not changed by it.
    items[0].delta["xs"].append(0)
    assert items[0].delta["xs"] == [1, 2, 3]


async def test_what_was_saved_is_decoded_when_it_is_asked_for(client: Client, engine: Callable[..., Any]) -> None:
    """Whoever reads only the text of an output does not see what it saved, be it malformed."""
    good, bad = [["s", ["x"], 1], ["s", ["y"], 2]], [["s", ["x"], msgspec.msgpack.Ext(99, b"")]]

    async def script(stage: Stage) -> None:
        await stage.accept()
        for index, step in enumerate((good, bad)):
            raw = messages.RawOutput(
                attempt=1,
                seq=stage.seq,
                index=index,
                token_ids=[1],
                text="ab"[index],
                deltas=[msgspec.Raw(msgspec.msgpack.encode(step))],
            )
            await stage.append(encode(raw))
        await stage.final(manifest=[])

    async with engine(script), client.trace("tiny", "hello") as trace:
        outputs = [event async for event in client.subscribe(trace.id) if isinstance(event, tracewire.Output)]
        assert [output.text for output in outputs] == ["a", "b"]
        assert "<Output 1-1 of invoke 0, choice 0, from token 0: [1], 'a'" in repr(outputs[0])
        assert outputs[0].delta == {"x": 1, "y": 2}
        assert outputs[0].only(frozenset({"y"})).delta == {"y": 2}
        with pytest.raises(BrokenStream, match="1-2"):
            _ = outputs[1].delta
        nothing = [event async for event in client.subscribe(trace.id, names=()) if isinstance(event, tracewire.Output)]
        assert [output.deltas for output in nothing] == [[[]], [[]]]
        with pytest.raises(BrokenStream, match="1-2"):
            await trace.result()


async def test_arrays_arrive_as_arrays(client: Client, engine: Callable[..., Any]) -> None:
    vector = torch.linspace(-1, 1, 7, dtype=torch.bfloat16)

    async def script(stage: Stage) -> None:
        await stage.accept()
        for _ in range(2):
            await stage.save("a", {"vectors": vector})
        await stage.final(deltas=[(0, 0, [Set(path=("last",), value=1)])])

    async with engine(script), client.trace("tiny", "hello") as trace:
        output = await anext(trace)
        assert output.delta["vectors"][0].dtype.name == "bfloat16"
        result = await trace.result()
    assert len(result.saves["vectors"]) == 2
    assert result.saves["vectors"][1].astype(np.float32).tolist() == vector.float().tolist()
    assert result.saves["last"] == 1


# --- several prompts and choices --------------------------------------------------------------------------------------


async def test_several_prompts_and_choices(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for invoke, each in enumerate(stage.submission.invokes):
            for choice in reversed(range(each.sampling.get("n", 1))):
                await stage.save(f"{invoke}{choice}", {"where": [invoke, choice]}, invoke=invoke, choice=choice)
        await stage.final()

    async with engine(script):
        async with client.trace("tiny", prompts=["a", Prompt("b", n=3)], block=watch) as trace:
            await anext(trace)
            early = trace.state()
            assert [len(invoke.choices) for invoke in early.invokes] == [1, 3]
            assert early.invokes[1].choices[2].text == ""
            result = await trace.result()
        assert [[choice.text for choice in invoke.choices] for invoke in result.invokes] == [
            ["00"],
            ["10", "11", "12"],
        ]
        assert result.invokes[1].choices[2].saves == {"where": [[1, 2]]}
        for name in ("text", "token_ids", "saves", "finish_reason"):
            with pytest.raises(
                AmbiguousResult, match=rf"2 prompts and 4 choices: ask .invokes\[i\].choices\[j\].{name}"
            ):
                getattr(result, name)


# --- failures ---------------------------------------------------------------------------------------------------------


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


async def test_a_block_that_an_engine_refuses(client: Client, engine: Callable[..., Any]) -> None:
    failure = Failure(
        type="UnknownModulePath", message="no x; the nearest is y", field="block", filename="f.py", line=7, source="m.x"
    )

    async def script(stage: Stage) -> None:
        await stage.final("rejected", failure)

    async with engine(script), client.trace("tiny", "hello", watch) as trace:
        with pytest.raises(UnknownModulePath, match=r"block: no x; the nearest is y \(f\.py:7\)") as caught:
            await trace.result()
        assert (caught.value.line, caught.value.source) == (7, "m.x")


async def test_a_block_that_raises_is_an_error_after_its_last_output(
    client: Client, engine: Callable[..., Any]
) -> None:
    failure = Failure(
        type="ZeroDivisionError",
        message="division by zero",
        field="block",
        filename="service.py",
        line=12,
        source="    x = 1 / 0",
        traceback='  File "service.py", line 12, in watch\n    x = 1 / 0\n',
    )

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await stage.final("failed", failure)

    async with engine(script), client.trace("tiny", "hello", watch) as trace:
        assert (await anext(trace)).text == "one"
        with pytest.raises(InterventionError, match=r"division by zero\n  at service.py:12\n    x = 1 / 0") as caught:
            await anext(trace)
        error = caught.value
        assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
        assert (error.filename, error.line, error.source) == ("service.py", 12, "x = 1 / 0")
        assert error.remote_traceback is not None
        assert "in watch" in error.remote_traceback
        assert error.trace_id == trace.id
        assert error.result is not None
        assert error.result.saves == {"x": [1]}
        assert (await trace.accepted()).model == "tiny"
        with pytest.raises(InterventionError) as again:
            await trace.result()
        assert again.value.result.text == "one"


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
async def test_a_trace_that_its_engine_could_not_end(client: Client, engine: Callable[..., Any], status: str) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        error = Failure(type="EngineShutdown", message="it was shut down") if status == "failed" else None
        await stage.final(status, error)

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(TraceFailed, match=status) as caught:
            await trace.result()
        assert not isinstance(caught.value, InterventionError)
        assert caught.value.status == status
        assert caught.value.result.text == "one"
        assert caught.value.type == ("EngineShutdown" if status == "failed" else None)


async def test_a_stopped_trace_is_a_result(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.final("stopped", save_errors={"0.0.bad": "an object"})

    async with engine(script), client.trace("tiny", "hello") as trace:
        result = await trace.result()
    assert (result.status, result.text, result.saves) == ("stopped", "", {})
    assert result.save_errors == {"0.0.bad": "an object"}


async def test_a_state_that_differs_from_the_engine_s_is_an_error(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1, "y": 2})
        wrong = Manifest(invoke=0, choice=0, name="x", kind="list", length=1, digest=bytes(16))
        await stage.final(manifest=[wrong])

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(StateMismatch, match=r"0\.0\.x") as caught:
            await trace.result()
        assert "0.0.x" in caught.value.names


async def test_a_gap_in_the_events_is_an_error(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        stage.seq += 1
        await stage.append(tracewire_output(stage))

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(EventsLost, match=r"after .1-0. and before 1-2"):
            await trace.result()


def tracewire_output(stage: Stage) -> bytes:

    return encode(messages.DecodedOutput(attempt=stage.attempt, seq=stage.seq, token_ids=[1], text="x", deltas=[[]]))


async def test_events_of_a_newer_version(client: Client, engine: Callable[..., Any], redis_url: str) -> None:

    async def unknown(stage: Stage) -> None:
        await stage.accept()
        await stage.append(msgspec.msgpack.encode(["weather", 1, 1, True]))
        stage.fold.seq += 1
        await stage.save("one", {"x": 1})
        await stage.final()

    async def garbage(stage: Stage) -> None:
        await stage.accept()
        await stage.append(b"\xc1 garbage")

    async with engine(unknown):
        async with client.trace("tiny", "hello") as trace:
            assert (await trace.result()).saves == {"x": [1]}
        kinds = [type(event).__name__ for event in await collected(client.subscribe(trace.id))]
        assert kinds == ["Accepted", "Output", "Final"]
        assert (await client.get_state(trace.id)).saves == {"x": [1]}
    async with engine(garbage), client.trace("tiny", "hello") as trace:
        with pytest.raises(BrokenStream, match="event 1-1 cannot be read"):
            await trace.result()


async def test_an_entry_of_a_newer_major_schema(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    import redis.asyncio

    async def script(stage: Stage) -> None:
        async with Bus.open(redis_url, prefix=prefix) as bus, redis.asyncio.Redis.from_url(redis_url) as raw:
            await raw.xadd(bus.keys.events(stage.trace), {b"v": b"2.0", b"d": b"?"}, id="1-0")

    async with engine(script), client.trace("tiny", "hello") as trace:
        with pytest.raises(BrokenStream, match=r"schema 2\.0"):
            await trace.accepted()


# --- restarts ---------------------------------------------------------------------------------------------------------


async def test_a_restart_is_an_item_and_the_fold_starts_over(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("lost", {"x": "lost"})
        await stage.restart("its engine died")
        await stage.accept(engine="another")
        await stage.save("kept", {"x": "kept"})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        items = await collected(trace)
        result = await trace.result()
        assert (await trace.accepted()).engine == "another"
        assert [type(item).__name__ for item in items] == ["Output", "Restarted", "Output"]
        assert items[1].reason == "its engine died"
        assert [items[0].id, items[2].id] == ["1-1", "2-2"]
        assert (result.text, result.saves, result.attempt) == ("kept", {"x": ["kept"]}, 2)
        assert (await client.get_state(trace.id)).saves == {"x": ["kept"]}


# --- what is refused before it is submitted ---------------------------------------------------------------------------


def undecorated(model, tracer, live):
    pass


PIXELS = np.zeros((4, 5, 3), np.uint8)


def with_media(media: Any) -> dict[str, Any]:
    """A prompt with such media."""
    return {"prompt": {"prompt": "x", "multi_modal_data": media}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt": ({}, "prompt", "expected a prompt"),
    "empty text": ({"prompt": ""}, "prompt", "is empty"),
    "no tokens": ({"prompt": []}, "prompt", "is empty"),
    "empty tensor": ({"prompt": torch.zeros(0, dtype=torch.int64)}, "prompt", "is empty"),
    "bytes": ({"prompt": b"abc"}, "prompt", "expected text, token ids or chat messages"),
    "a number": ({"prompt": 5}, "prompt", "expected text"),
    "a dict": ({"prompt": {"text": "x"}}, "prompt", "prompt_token_ids or input_ids"),
    "a mask of another length": (
        {"prompt": {"input_ids": [1, 2], "attention_mask": [1]}},
        "prompt.attention_mask",
        "2 numbers",
    ),
    "a shared number": ({"shared": {"n": 1}}, "shared.n", "a list, a dict or an array"),
    "a shared name that is none": ({"shared": {"a b": []}}, "shared", "names that a block can use"),
    "shared values that are large": ({"shared": {"xs": [b"x" * 2**21]}}, "shared", "at most 1048576 bytes"),
    "shared values in a list": ({"shared": [1]}, "shared", "expected a dict"),
    "an image beside nothing": (
        {"prompt": {"multi_modal_data": {"image": PIXELS}}},
        "prompt",
        "prompt_token_ids or input_ids",
    ),
    "images that are a list": (with_media([PIXELS]), "prompt.multi_modal_data", "expected a dict"),
    "sound": (with_media({"audio": PIXELS}), "prompt.multi_modal_data.audio", "images alone"),
    "no images": (with_media({"image": []}), "prompt.multi_modal_data.image", "an empty list"),
    "an image's address": (with_media({"image": "x.png"}), "prompt.multi_modal_data.image", "of uint8, or Pillow's"),
    "an image of floats": (
        with_media({"image": [PIXELS, PIXELS / 255]}),
        "prompt.multi_modal_data.image[1]",
        "got float64 [4, 5, 3]",
    ),
    "an image in grey": (with_media({"image": PIXELS[..., 0]}), "prompt.multi_modal_data.image", "got uint8 [4, 5]"),
    "images without end": (
        with_media({"image": np.broadcast_to(np.uint8(0), (1 << 15, 1 << 12, 3))}),
        "prompt.multi_modal_data.image",
        "at most 268435456 bytes",
    ),
    "an image to a model of text": (with_media({"image": PIXELS}), "prompt.multi_modal_data", "takes no images"),
    "a float token": ({"prompt": [1, 2.5]}, "prompt[1]", "expected token ids"),
    "a bool token": ({"prompt": [True]}, "prompt[0]", "expected token ids"),
    "a negative token": ({"prompt": [1, -1]}, "prompt[1]", "not negative, got -1"),
    "a message without a role": ({"prompt": [{"content": "x"}]}, "prompt[0].role", "with a role"),
    "a message without content": ({"prompt": [{"role": "user"}]}, "prompt[0].content", "with a content"),
    "messages and tokens": ({"prompt": [{"role": "user", "content": "x"}, 5]}, "prompt[0]", "expected token ids"),
    "both": ({"prompt": "x", "prompts": ["y"]}, "prompts", "got both"),
    "no prompts": ({"prompts": []}, "prompts", "at least one"),
    "prompts is text": ({"prompts": "abc"}, "prompts", "expected a list of prompts"),
    "prompts is a number": ({"prompts": 3}, "prompts", "expected a list of prompts"),
    "an empty one of several": ({"prompts": ["a", ""]}, "prompts[1]", "is empty"),
    "sampling is no plain value": ({"prompt": "x", "stop": [object()]}, "sampling.stop[0]", "got object"),
    "sampling of one prompt": ({"prompts": [Prompt("x", stop=print)]}, "prompts[0].sampling.stop", "expected a number"),
    "a plain function": ({"prompt": "x", "block": undecorated}, "block", "decorate it with @tracewire.intervention"),
    "source text": ({"prompt": "x", "block": "x = 1"}, "block", "expected an intervention"),
    "live is a list": ({"prompt": "x", "live": [1]}, "live", "expected a dict"),
    "a live name": ({"prompt": "x", "live": {"a b": 1}}, "live", "live.NAME"),
    "a live value": ({"prompt": "x", "live": {"alpha": object()}}, "live.alpha", "got object"),
    "a variable": ({"prompt": "x", "block": watch(direction=object())}, "variables.direction", "What can travel"),
    "no deadline": ({"prompt": "x", "deadline": 0}, "deadline", "positive"),
    "a deadline of text": ({"prompt": "x", "deadline": "1h"}, "deadline", "positive"),
    "an endless deadline": ({"prompt": "x", "deadline": float("inf")}, "deadline", "positive"),
    "a priority": ({"prompt": "x", "priority": "high"}, "priority", "an integer"),
    "an id": ({"prompt": "x", "trace_id": "a b"}, "trace_id", "1 to 128"),
    "an empty id": ({"prompt": "x", "trace_id": ""}, "trace_id", "1 to 128"),
    "a model": ({"model": None, "prompt": "x"}, "model", "its name"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_input_is_refused_naming_the_field(client: Client, engine: Callable[..., Any], case: str) -> None:
    arguments, field, message = REFUSED[case]
    async with engine() as serving:
        with pytest.raises(TraceRejected) as caught:
            async with client.trace(**{"model": "tiny", **arguments}):
                pass
        assert caught.value.field == field
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{field}: ")
        assert serving.taken == []
        # A good one right after.
        async with client.trace("tiny", "hello") as trace:
            assert (await trace.result()).text == "one two three"


async def test_a_path_that_does_not_exist_is_refused_with_the_nearest(
    client: Client, engine: Callable[..., Any]
) -> None:
    @intervention
    def wrong(net, tracer, live):
        kept = net.model.layers[1].mlp.output.save()
        other = net.model.layers[1].mpl.output.save()

    async with engine() as serving:
        model = await client.models.get("tiny")
        with pytest.raises(UnknownModulePath, match=r"model\.layers\.1\.mpl.*model\.layers\.1\.mlp") as caught:
            async with client.trace(model, "hello", wrong):
                pass
        error = caught.value
        assert error.field == "block"
        assert error.filename == __file__
        assert error.line == wrong.first_line + 1
        assert error.source == "other = net.model.layers[1].mpl.output.save()"
        assert error.nearest == "model.layers.1.mlp"
        with pytest.raises(UnknownModulePath):
            async with client.trace("tiny", "hello", wrong):
                pass
        assert serving.taken == []


async def test_a_submission_that_is_too_large_is_refused(
    client: Client, engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracewire_bus.domain.limits.MAX_BYTES", 1000)
    async with engine():
        with pytest.raises(TraceRejected, match=r"may take 1000; large values travel beside it") as caught:
            async with client.trace("tiny", "hello" * 1000):
                pass
        assert caught.value.field == "submission"


# --- handles in other tasks -------------------------------------------------------------------------------------------


@pytest.fixture
async def fixture_trace(client: Client, redis_url: str, prefix: str) -> AsyncIterator[Trace]:
    """A trace that is entered when a fixture is set up and left when it is torn down, by other tasks."""
    async with client.trace("tiny", "from a fixture", trace_id=None) as trace:
        yield trace


@pytest.fixture
async def registered(redis_url: str, prefix: str) -> AsyncIterator[None]:
    """An entry of the registry, without an engine behind it yet."""
    async with Bus.open(redis_url, prefix=prefix) as bus:
        await bus.registry.register(engine_info(engine="registered"), ttl_s=600)
        yield


@pytest.mark.usefixtures("registered")
async def test_a_trace_of_a_fixture(fixture_trace: Trace, engine: Callable[..., Any]) -> None:
    async with engine():
        assert texts(await collected(fixture_trace)) == ["one", " two", " three"]
        assert (await fixture_trace.result()).saves == {"scores": [0.0, 0.5, 1.0]}


async def test_a_trace_entered_in_one_task_and_closed_in_another(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        trace = client.trace("tiny", "hello")
        await asyncio.create_task(trace.__aenter__())
        first = await asyncio.create_task(trace.__anext__())
        assert first.text == "one"
        with anyio.move_on_after(PATIENCE):
            # A scope around one step of it is no business of the next.
            assert (await anext(trace)).text == " two"
        assert (await asyncio.create_task(trace.result())).text == "one two three"
        await asyncio.create_task(trace.__aexit__(None, None, None))


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
        assert await asyncio.create_task(left.__anext__()) == "one"
        await asyncio.create_task(left.aclose())  # type: ignore[attr-defined]
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


# --- subscriptions ----------------------------------------------------------------------------------------------------


async def test_subscriptions_from_any_place_fold_to_the_same(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(10):
            await stage.save(str(number), {"a": number, "b": -number})
        await gate.wait()
        for number in range(10, 20):
            await stage.save(str(number), {"a": number, "b": -number})
        await stage.final()

    async def fold(events: Subscription, into: dict[str, Fold], name: str) -> None:
        into[name] = Fold()
        async for event in events:
            into[name].apply(event)
        into[name].verify()

    folds: dict[str, Fold] = {}
    async with engine(script), client.trace("tiny", "hello") as trace:
        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as group:
                group.start_soon(fold, client.subscribe(trace.id), folds, "before")
                seen = 0
                async for _ in trace:
                    seen += 1
                    if seen == 10:
                        group.start_soon(fold, client.subscribe(trace.id), folds, "in the middle")
                        group.start_soon(fold, client.subscribe(trace.id, names={"a"}), folds, "one name")
                        now = client.subscribe(trace.id, since="now")
                        await now.start()
                        gate.set()
        result = await trace.result()
        await fold(client.subscribe(trace.id), folds, "after")
        assert texts(await collected(now)) == [str(number) for number in range(10, 20)]
        for name in ("before", "in the middle", "after"):
            assert folds[name].choices[0, 0].saves == result.saves
            assert folds[name].digest() == result.digest()
        assert folds["one name"].choices[0, 0].saves == {"a": list(range(20))}


async def test_a_subscription_goes_on_after_any_event(client: Client, engine: Callable[..., Any]) -> None:
    async with engine():
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        events = await collected(client.subscribe(trace.id))
        kinds = [type(event).__name__ for event in events]
        assert kinds == ["Accepted", "Output", "Output", "Output", "Final"]
        assert isinstance(events[1], tracewire.Output)
        for cut in range(4):
            rest = await collected(client.subscribe(trace.id, since=f"1-{cut}"))
            assert [event.seq for event in rest] == [event.seq for event in events[cut + 1 :]]
        subscription = client.subscribe(trace.id)
        async with subscription:
            await anext(subscription)
            output = await anext(subscription)
            assert subscription.position == output.id
        assert await collected(subscription) == []
        state = await client.get_state(trace.id)
        assert await collected(client.subscribe(trace.id, since=state.position)) == []
        assert await collected(client.subscribe(trace.id, since="now")) == []


async def test_names_limit_what_is_saved_and_nothing_else(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"keep": 1, "drop": 2})
        await stage.final(
            deltas=[(0, 0, [Set(path=("keep",), value=[3]), Set(path=("drop",), value=[4])])],
            save_errors={"0.0.keep.dotted": "r", "0.0.drop": "r", "0.0.keep": "r"},
        )

    async with engine(script):
        async with client.trace("tiny", "hello") as trace:
            await trace.result()
        events = await collected(client.subscribe(trace.id, names=["keep"]))
        assert events[1].delta == {"keep": [1]}
        assert events[1].text == "one"
        final = events[2]
        assert isinstance(final, Final)
        assert [change.path for _, _, changes in final.deltas for change in changes] == [("keep",)]
        assert [entry.name for entry in final.manifest] == ["keep"]
        assert set(final.save_errors) == {"0.0.keep"}
        with pytest.raises(TypeError, match="not 'keep'"):
            client.subscribe(trace.id, names="keep")


async def test_a_trace_that_was_never_submitted(client: Client) -> None:
    with pytest.raises(UnknownTrace, match="no trace 'nowhere'"):
        await anext(client.subscribe("nowhere"))
    with pytest.raises(UnknownTrace):
        async with client.subscribe("nowhere", since="now"):
            pass
    with pytest.raises(UnknownTrace):
        await client.get_state("nowhere")
    for since in ("yesterday", "1", "a-b", ""):
        with pytest.raises(ValueError, match="since"):
            client.subscribe("nowhere", since=since)
    with pytest.raises(TypeError, match="a trace's id"):
        client.subscribe(5)  # type: ignore[arg-type]


@pytest.mark.usefixtures("registered")
async def test_a_trace_can_be_followed_before_any_engine_took_it(client: Client, engine: Callable[..., Any]) -> None:
    events: list[Any] = []

    async def follow(trace: str, started: anyio.Event) -> None:
        async with client.subscribe(trace) as subscription:
            started.set()
            events.extend(await collected(subscription))

    async with client.trace("tiny", "hello") as trace:
        state = await client.get_state(trace.id)
        assert (state.seq, state.status, state.text, state.saves, state.position) == (-1, None, "", {}, "start")
        async with anyio.create_task_group() as group:
            started = anyio.Event()
            group.start_soon(follow, trace.id, started)
            await started.wait()
            async with engine():
                await trace.result()
    assert texts(events) == ["one", " two", " three"]


async def test_the_state_now_while_a_trace_runs(client: Client, engine: Callable[..., Any]) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(300):
            await stage.save("x", {"n": number})
        await gate.wait()
        await stage.save("y", {"n": 300})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        for _ in range(300):
            await anext(trace)
        state = await client.get_state(trace.id)
        assert state.status is None
        assert not state.finished
        assert state.saves["n"] == list(range(300))
        gate.set()
        rest = await collected(client.subscribe(trace.id, since=state.position))
        assert texts(rest) == ["y"]
        final = await client.get_state(trace.id)
        assert final.finished
        assert final.saves == (await trace.result()).saves
        assert final.digest() == (await trace.result()).digest()


async def test_a_consumer_that_leaves_harms_nobody(
    client: Client, engine: Callable[..., Any], redis_url: str, prefix: str
) -> None:
    gate = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await gate.wait()
        await stage.save("two", {"x": 2})
        await stage.final()

    async with engine(script), client.trace("tiny", "hello") as trace:
        async with tracewire.connect(redis_url, prefix=prefix) as other:
            leaving = other.subscribe(trace.id)
            await anext(leaving)
        closing = client.subscribe(trace.id)
        await anext(closing)
        await closing.aclose()
        staying = client.subscribe(trace.id)
        await anext(staying)
        gate.set()
        assert (await trace.result()).saves == {"x": [1, 2]}
        assert texts(await collected(staying)) == ["one", "two"]


async def test_errors_have_one_base() -> None:
    for name in tracewire.__all__:
        value = getattr(tracewire, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, TracewireError), name
    assert issubclass(UntransportableVariable, TraceRejected)
    assert issubclass(UnknownModel, LookupError)
