"""What is asked of every way to Redis, from end to end."""

from __future__ import annotations

import anyio

import tracewire
from tests.scripted import ScriptedEngine, Stage, engine_info
from tracewire import Final, Output, Steered

__all__ = ["end_to_end"]

PATIENCE = 30


async def steered(stage: Stage) -> None:
    """An output, another once it has been steered, and the end."""
    await stage.accept()
    await stage.output("one")
    await stage.steered()
    await stage.output(" two")
    await stage.final()


async def end_to_end(url: str, prefix: str, *, follower: str = "", engine: str = "") -> None:
    """Submit, follow from two clients, steer and end; then cancel one that waits, and one that runs."""
    with anyio.fail_after(PATIENCE):
        async with (
            ScriptedEngine.running(engine or url, prefix, steered, engine_info()) as running,
            tracewire.connect(url, prefix=prefix, client="one") as client,
            tracewire.connect(follower or url, prefix=prefix, client="two") as other,
        ):
            assert (await client.model("tiny")).name == "tiny"
            seen: list[object] = []
            async with client.trace("tiny", "hello", live={"alpha": 0.0}) as trace, anyio.create_task_group() as group:
                started = anyio.Event()

                async def follow() -> None:
                    async for event in other.subscribe(trace.id):
                        seen.append(event)
                        if isinstance(event, Output):
                            started.set()

                group.start_soon(follow)
                await started.wait()
                await trace.steer(alpha=2.0)
                result = await trace.result()
            assert result.text == "one two"
            assert [type(event).__name__ for event in seen] == ["Accepted", "Output", "Steered", "Output", "Final"]
            assert isinstance(seen[2], Steered)
            assert isinstance(seen[-1], Final)
            assert [submission.trace for submission in running.taken] == [trace.id]

            # It is asked to end where it waits.
            async with client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
                await trace.accepted()
                assert await trace.cancel("enough")
                statuses = [event.status async for event in other.subscribe(trace.id) if isinstance(event, Final)]
            assert statuses == ["cancelled"]
