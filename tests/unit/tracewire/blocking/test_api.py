"""The blocking client has what the async one has, typed alike, and does the same."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest

import tracewire
from tests.support import blocking as generator
from tests.support.bus_engine import Stage
from tracewire import ClientClosed, Steered, TraceRejected, UnknownEngine, UnknownTrace

PATIENCE = 60


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
            assert client.server.info().mode == "standalone"
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
