"""What is asked of every way to Redis, from end to end."""

from __future__ import annotations

import uuid

import anyio

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tracewire import Final, Output, Steered
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Invoke, Submission

__all__ = ["end_to_end"]

PATIENCE = 60


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
            BusEngine.running(engine or url, prefix, steered, engine_info()) as running,
            tracewire.connect(url, prefix=prefix, name="one") as client,
            tracewire.connect(follower or url, prefix=prefix, name="two") as other,
        ):
            assert (await client.models.get("tiny")).name == "tiny"
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

        # One that no engine runs is ended by whoever cancels it; engines count what is kept, and drop it.
        async with Bus.open(url, prefix=prefix) as bus, Bus.open(engine or url, prefix=prefix) as keeper:
            waits = f"waits-{uuid.uuid4().hex}"
            await bus.submit(Submission(trace=waits, model="tiny", invokes=[Invoke(prompt="hello")], detach=True))
            await bus.cancel(waits, by="one")
            await keeper.finished.check()
            count, size = await keeper.finished.total()
            assert count >= 3
            assert size > 100 * count
            assert await keeper.finished.drop_beyond(1, 0) == count - 1
            assert await bus.records.ended(waits)
