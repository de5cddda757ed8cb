"""Tasks that no scope owns, and all that there are, on asyncio and on trio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

from tracewire_bus.transport.loops import Task, on_trio, running_loop, shielded

__all__ = ["all_tasks", "in_another_task", "started", "task_name"]


def all_tasks() -> set[Any]:
    """All tasks of the loop that runs here."""
    if not on_trio():
        return asyncio.all_tasks()
    import trio

    def below(task: Any) -> Iterator[Any]:
        yield task
        for nursery in task.child_nurseries:
            for child in nursery.child_tasks:
                yield from below(child)

    return set(below(trio.lowlevel.current_root_task()))


def task_name(task: Any) -> str:
    """What a task is called."""
    return str(task.name if on_trio() else task.get_name())


def started(awaitable: Awaitable[Any]) -> Task[Any]:
    """A task of its own. `loops.shielded` waits for what it comes to."""

    async def run() -> Any:
        return await awaitable

    return running_loop().create_task(run(), name="a test's")


async def in_another_task(awaitable: Awaitable[Any]) -> Any:
    """What `awaitable` comes to in a task of its own."""
    return await shielded(started(awaitable))
