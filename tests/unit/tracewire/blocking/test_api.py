"""The blocking client has what the async one has, typed alike, and does the same."""

from __future__ import annotations

import inspect
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support import blocking as generator
from tests.support.bus_engine import BusEngine, Script, Stage, engine_info, tiny
from tracewire import ClientClosed, ConnectError, Steered, TraceRejected, UnknownEngine, UnknownTrace

PATIENCE = 30


def test_it_is_written_from_the_async_client_as_that_is() -> None:
    assert generator.FILE.read_text() == generator.source(), "run `python -m tests.support.blocking`"


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize("cls", [*generator.CLASSES, tracewire.Model], ids=lambda cls: cls.__name__)
def test_no_public_method_is_missing(cls: type) -> None:
    ours = getattr(tracewire.blocking, cls.__name__)
    renamed = {"close" if name == "aclose" else name for name in public(cls)}
    assert renamed <= public(ours) | ({"iter", "live", "all", "cache", "stop"} if cls is tracewire.Tracer else set())
    for name in public(cls) - {"aclose"}:
        function = getattr(cls, name)
        if inspect.isfunction(function) and hasattr(ours, name):
            theirs, own = inspect.signature(function).parameters, inspect.signature(getattr(ours, name)).parameters
            assert [(one.name, one.kind, one.default) for one in own.values()] == [
                (one.name, one.kind, one.default) for one in theirs.values()
            ]


def test_a_client_is_made_with_the_same_arguments() -> None:
    wanted, own = (inspect.signature(cls.__init__) for cls in (tracewire.Client, tracewire.blocking.Client))
    assert str(own) == str(wanted)


@pytest.fixture
async def serving(embedded: str, prefix: str) -> AsyncIterator[Any]:
    """Runs an engine, and a function on a thread with a blocking client's class, its URL and its prefix."""

    async def run(function: Any, script: Script = tiny, **info: Any) -> Any:
        async with BusEngine.running(embedded, prefix, script, engine_info(**info)):
            with anyio.fail_after(PATIENCE):
                made = partial(tracewire.blocking.Client, embedded, prefix=prefix)
                return await anyio.to_thread.run_sync(function, made, abandon_on_cancel=True)

    return run


async def test_traces_are_read_in_a_loop(serving: Any) -> None:
    def program(made: Any) -> None:
        with made() as client:
            assert [item.text for item in client.trace("tiny", "x")] == ["one", " two", " three"]
            assert list(client.trace("tiny", "x").text_stream()) == ["one", " two", " three"]
            assert [one.index for one in client.trace("tiny", "x").outputs()] == [0, 1, 2]
            with client.trace("tiny", "x", max_tokens=3) as trace:
                assert trace.accepted().model == "tiny"
                result = trace.result()
                assert (result.text, trace.status, trace.until_done()) == ("one two three", "finished", "finished")
                assert trace.state().text == "one two three"
            with client.subscribe(trace.id) as subscription:
                assert [event.type for event in subscription] == ["accepted", *["output"] * 3, "final"]
                assert subscription.result().text == "one two three"
            assert client.get_state(trace.id).text == "one two three"
            for text in client.trace("tiny", "x").text_stream():
                assert text == "one"
                break
            with pytest.raises(TraceRejected, match="did you mean 'deadline'"):
                client.trace("tiny", "x", dedline=1)
            with pytest.raises(UnknownTrace):
                client.subscribe("nobody-s").start()
        with pytest.raises(ClientClosed):
            client.models.get("tiny")
        trace.close()

    await serving(program)


async def test_resources_are_listed(serving: Any) -> None:
    def program(made: Any) -> None:
        with made() as client:
            assert [engine.name for engine in client.engines.list(model="tiny")] == ["e9"]
            assert client.engines.get("e9").model == "tiny"
            with pytest.raises(UnknownEngine):
                client.engines.drain("nobody")
            with pytest.raises(TimeoutError):
                client.engines.drain("e9").wait(timeout=0)
            assert [info.name for info in client.models.list()] == ["tiny"]
            assert list(client.dead_letters.list(limit=3)) == []
            assert list(client.watch_groups.list()) == []
            edits = client.edits("tiny")
            edits.install("a", interventions=[tracewire.Probe("p", "residual(0)")], timeout=0)
            assert [edit.name for edit in edits.list()] == ["a"]
            edits.remove("a", timeout=0)
            with client.watch(since="start") as watch:
                assert watch.position

    await serving(program, engine="e9")


async def test_steering_from_another_thread(serving: Any) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one")
        await stage.steered()
        await stage.output("two")
        await stage.final()

    def program(made: Any) -> None:
        with made() as client, client.trace("tiny", "x", live={"alpha": 1.0}) as trace:
            for item in trace:
                if item.type == "output" and item.index == 0:
                    steering = threading.Thread(target=trace.steer, kwargs={"alpha": 2.0})
                    steering.start()
                    steering.join()
                elif isinstance(item, Steered):
                    assert item.first_token() == 1
            assert trace.get_live().values == {"alpha": 2.0}

    await serving(program, script)


async def test_several_threads_share_a_client(serving: Any) -> None:
    def program(made: Any) -> None:
        with made() as client, ThreadPoolExecutor(8) as pool:
            texts = pool.map(lambda _: client.trace("tiny", "x").result().text, range(24))
            assert set(texts) == {"one two three"}
            closing = [pool.submit(client.close) for _ in range(4)]
            assert [one.result() for one in closing] == [None] * 4

    await serving(program)


async def test_closing_ends_what_other_threads_wait_for(serving: Any) -> None:
    waiting = threading.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        waiting.set()
        await anyio.sleep_forever()

    def program(made: Any) -> None:
        with ThreadPoolExecutor(2) as pool, made() as client:
            trace = client.trace("tiny", "x")
            result = pool.submit(trace.result)
            watched = pool.submit(next, client.watch(model="other"))
            waiting.wait()
            client.close()
            for one in (result, watched):
                assert isinstance(one.exception(), tracewire.TracewireError | StopIteration)

    await serving(program, script)


async def test_inline_blocks(serving: Any) -> None:
    def program(made: Any) -> None:
        with made() as client:
            model = client.models.get("tiny")
            assert isinstance(model, tracewire.blocking.Model)
            direction = np.ones(4, np.float32)
            with model.trace("x", max_tokens=3) as tracer:
                scores = [].save()
                for step in tracer.iter[:]:
                    scores.append(model.logits.sum() + direction.sum())
            assert isinstance(tracer, tracewire.blocking.Tracer)
            assert tracer.result().text == "one two three"
            assert list(tracer.saves) == ["scores"]
            with model.trace(max_tokens=3) as tracer:
                for text in ("a", "b"):
                    with tracer.invoke(text):
                        top = model.logits.argmax().save()
            assert tracer.until_done() == "finished"

    await serving(program)


async def test_arrays_that_are_referred_to_are_loaded(serving: Any) -> None:
    array = np.arange(6, dtype=np.float32)

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": await stage.store(array, "x")})
        await stage.final()

    def program(made: Any) -> None:
        with made() as client:
            (loaded,) = client.load(client.trace("tiny", "x").result().saves)["x"]
            assert loaded.tolist() == array.tolist()

    await serving(program, script)


async def test_a_client_that_is_not_connected_says_how(embedded: str, prefix: str) -> None:
    client = tracewire.blocking.Client(embedded, prefix=prefix)
    for call in (client.models.list, partial(client.trace, "tiny", "x")):
        with pytest.raises(ConnectError, match="not connected yet: enter it with `with client:`"):
            call()
    with pytest.raises(ConnectError, match="cannot connect"):
        await anyio.to_thread.run_sync(tracewire.blocking.connect, "redis://127.0.0.1:1")
