"""A recording has a trace's events, submission, steering and arrays, and needs no Redis to be shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.cli import WORDS, steered_story
from tests.support.queue import settled
from tracewire import Client, Recording, Steer
from tracewire.traces.recorder.container import read_content, write_content
from tracewire_bus.wire.messages import Versions

PATIENCE = 60
VECTOR = np.arange(8, dtype=np.float32)


async def steered(client: Client, engine: Callable[..., Any], **options: Any) -> Any:
    """A trace that was steered at token 4."""
    trace = client.trace(
        "tiny", "x", live={"alpha": 0.0}, interventions=[Steer("residual(1)", VECTOR, scale=tracewire.Live("alpha"))]
    )
    async with engine(steered_story, engine="e1"), trace:
        async for item in trace:
            # The story ends after its tenth token, which the sixth change lets out.
            if isinstance(item, tracewire.Output) and 3 <= item.index < len(WORDS) - 1:
                await trace.steer(alpha=float(item.index), by="me")
        return await trace.record(**options)


async def test_what_is_recorded_is_what_was(client: Client, engine: Callable[..., Any], tmp_path: Path) -> None:
    with anyio.fail_after(PATIENCE):
        recording = await steered(client, engine)
        path = tmp_path / "t.twrec"
        recording.save(path)
        read = Recording.open(path)
        live = [event async for event in client.subscribe(read.trace_id)]
        state = await client.get_state(read.trace_id)
    assert [event.type for event in read.events()] == [event.type for event in live]
    assert (read.complete, read.model, read.made_by, read.engine.engine) == (True, "tiny", "one", "e1")
    assert read.state().text == state.text
    assert read.state().digest() == state.digest()
    changes = read.steering()
    assert (changes[0].index, changes[0].values, changes[0].by) == (4, {"alpha": 3.0}, "me")
    assert [one.index for one in changes] == sorted(one.index for one in changes)
    assert read.submission is not None
    (steer,) = read.submission.interventions
    assert isinstance(steer, Steer)
    assert read.submission.invokes[0].prompt == "x"
    assert "text/html" in read._repr_mimebundle_()


async def test_a_running_trace_of_another_client_is_recorded_with_its_submission(
    client: Client, engine: Callable[..., Any], prefix: str
) -> None:
    go = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept(versions=Versions(torch="2", weights="ab"))
        await stage.output("half")
        await go.wait()
        await stage.output(" done")
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with (
            engine(script),
            client.trace("tiny", "x", temperature=0.5) as trace,
            tracewire.connect(client.url, prefix=prefix) as other,
        ):
            await anext(trace)
            half = await other.record(trace.id, until_now=True)
            assert (half.complete, half.state().text) == (False, "half")
            assert half.submission is not None
            assert half.submission.invokes[0].sampling == {"temperature": 0.5}
            assert half.engine.versions == {"torch": "2", "weights": "ab"}
            go.set()
            await trace.until_done()
            # The queue keeps it no longer, and the handle does.
            await settled(client._session.open_bus())
            late = await other.record(trace.id)
            assert (late.complete, late.submission) == (True, None)
            assert (await trace.record()).submission is not None


async def test_large_arrays_are_inside_or_references(
    client: Client, engine: Callable[..., Any], tmp_path: Path
) -> None:
    large = np.arange(1000, dtype=np.float32)

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("x", {"acts": await stage.store(large, "acts")})
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with engine(script), client.trace("tiny", "x") as trace:
            await trace.until_done()
            (await trace.record()).save(tmp_path / "inside")
            (await trace.record(arrays="reference")).save(tmp_path / "reference")
            with pytest.raises(ValueError, match="arrays: expected 'inside' or 'reference'"):
                await trace.record(arrays="none")  # type: ignore[arg-type]
    (loaded,) = await Recording.open(tmp_path / "inside").state().load("acts")
    assert np.array_equal(loaded, large)
    with pytest.raises(tracewire.ValueMissing, match="only a reference"):
        await Recording.open(tmp_path / "reference").state().load("acts")


async def test_restarts_and_gaps(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("old")
        await stage.restart("lost")
        await stage.accept()
        await stage.output("new")
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with engine(script), client.trace("tiny", "x") as trace:
            await trace.until_done()
        recording = await client.record(trace.id)
    assert recording.state().text == "new"
    assert recording.accepted is not None
    assert recording.accepted.attempt == 2


async def test_a_trimmed_stream_is_recorded_with_the_arrays_of_its_snapshot(
    client: Client, engine: Callable[..., Any]
) -> None:
    array = np.arange(100_000, dtype=np.float32)

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one ", {"acts": await stage.store(array, "acts")})
        await stage.save("two ", {"acts": await stage.store(array + 1, "acts")})
        assert await stage.bus.snapshots.take(stage.trace, stage.attempt) is not None
        await stage.output("three")
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with engine(script), client.trace("tiny", "x") as trace:
            await trace.until_done()
        recording = await client.record(trace.id)
        assert [event.type for event in recording.events()] == ["gap", "output", "final"]
        # Redis has dropped them since.
        await client._session.open_bus().command("DEL", client._session.open_bus().keys.blobs(trace.id))
        saved = await recording.state().saves.load()
    assert [item.tolist() for item in saved["acts"]] == [array.tolist(), (array + 1).tolist()]
    assert not recording.lacks_steering()


async def test_a_trace_that_was_steered_in_trimmed_events_cannot_run_again(
    client: Client, engine: Callable[..., Any]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("one ")
        await stage.steered()
        await stage.output("two ")
        assert await stage.bus.snapshots.take(stage.trace, stage.attempt) is not None
        await stage.output("three")
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with engine(script):
            trace = client.trace("tiny", "x", live={"alpha": 0.0})
            await trace.accepted()
            await trace.steer(alpha=1.0)
            await trace.until_done()
            recording = await trace.record()
            assert recording.lacks_steering()
            for again in (client.replay(recording), trace.fork([{"alpha": 2.0}], at=2)):
                with pytest.raises(tracewire.InvalidRecording, match="steered in events that its engine had trimmed"):
                    await again


async def test_a_file_with_an_event_that_cannot_be_read_is_refused(tmp_path: Path, client: Client, engine: Any) -> None:
    with anyio.fail_after(PATIENCE):
        recording = await steered(client, engine)
    path = tmp_path / "t.twrec"
    recording.save(path)
    content = read_content(path)
    content.events[2] = (content.events[2][0], content.events[2][1], b"\xc1")
    write_content(path, content)
    with pytest.raises(tracewire.InvalidRecording, match=r"t.twrec: an event of it cannot be read"):
        Recording.open(path)


async def test_an_unknown_trace_is_named(client: Client) -> None:
    with pytest.raises(tracewire.UnknownTrace):
        await client.record("nobody")
