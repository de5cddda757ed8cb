"""Waiting for a condition."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anyio

__all__ = ["until"]


async def until(condition: Callable[[], Any]) -> None:
    """Ask again and again until a condition holds: a function, or an async one, that returns something true.

    Raises:
        TimeoutError: it does not hold within two minutes.
    """
    with anyio.fail_after(120):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await anyio.sleep(0.005)
