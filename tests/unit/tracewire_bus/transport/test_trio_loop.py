"""What trio demands of tasks that no nursery of the program owns."""

from __future__ import annotations

from contextvars import ContextVar

import anyio
import pytest
import trio
import trio.testing

from tests.support.tasks import all_tasks, task_name
from tracewire_bus.transport.loops import running_loop
from tracewire_bus.transport.tasks import OwnedTask
from tracewire_bus.transport.trio_loop import TrioLoop, running


def test_a_run_that_ends_takes_its_tasks_along() -> None:
    cleaned: list[str] = []

    async def run() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append("up")

    async def main() -> TrioLoop:
        running().create_task(run(), name="one")
        await trio.testing.wait_all_tasks_blocked()
        return running()

    loop = trio.run(main)
    assert cleaned == ["up"]
    assert loop.is_closed()
    assert trio.run(main) is not loop


def test_an_error_in_a_task_does_not_end_the_program() -> None:
    async def run() -> None:
        raise KeyError("nobody asks")

    async def main() -> str:
        running().create_task(run(), name="one")
        await trio.testing.wait_all_tasks_blocked()
        return "went on"

    assert trio.run(main) == "went on"


def test_a_task_has_the_context_of_who_started_it() -> None:
    variable = ContextVar[str]("variable")

    async def run() -> str:
        return variable.get()

    async def main() -> str:
        variable.set("set")
        task = running().create_task(run(), name="one")
        await task.wait()
        return task.result()

    assert trio.run(main) == "set"


def test_the_result_of_a_cancelled_task_is_an_error() -> None:
    async def run() -> None:
        await trio.sleep_forever()

    async def main() -> None:
        task = running().create_task(run(), name="one")
        task.cancel()
        await task.wait()
        with pytest.raises(anyio.ClosedResourceError):
            task.result()

    trio.run(main)


async def test_an_owned_task_is_cleaned_up_by_whoever_closes_it_also_when_cancelled() -> None:
    """On trio each await of a cancelled task is cancelled: what has to be awaited then is shielded."""
    steps: list[str] = []
    begun = anyio.Event()

    async def run() -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
                steps.append("cleaned up")

    before = all_tasks()
    task = OwnedTask(run, "that is closed")
    await begun.wait()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await task.aclose()
    assert steps == ["cleaned up"]
    assert not [one for one in all_tasks() - before if task_name(one).startswith("tracewire")]
    assert not running_loop().is_closed()
