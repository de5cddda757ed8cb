"""What the control tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.control.blocks import dawdles
from tracewire import Client, Model

__all__ = ["LONG", "PROMPT", "held_up"]

PROMPT = "def add(a, b):"
LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


@asynccontextmanager
async def held_up(client: Client, model: Model) -> AsyncIterator[None]:
    """A slow engine: in every step it waits for somebody's block."""
    async with client.trace(model, PROMPT, dawdles(seconds=0.02), **LONG) as trace:
        await trace.accepted()
        yield
