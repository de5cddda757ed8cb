"""What the control tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from tests.support.blocks.steering import dawdles
from tracewire import Client, Model, Output, Steered

__all__ = ["LONG", "PROMPT", "check_order", "direction", "has", "held_up", "schedule_of", "steer_along"]

PROMPT = "def add(a, b):"
LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


@asynccontextmanager
async def held_up(client: Client, model: Model, prompt: Any = PROMPT) -> AsyncIterator[None]:
    """A slow engine: in every step it waits for somebody's block."""
    async with client.trace(model, prompt, dawdles(seconds=0.02), **LONG) as trace:
        await trace.accepted()
        yield


def has(item: Any, index: int) -> bool:
    """Whether an item is the output with the token of this index. Outputs come merged where their reader lags."""
    return isinstance(item, Output) and item.index <= index < item.index + len(item.token_ids)


def direction(model: Model) -> np.ndarray[Any, Any]:
    """A direction of some length in the residual stream."""
    vector = np.random.default_rng(5).standard_normal(model.info.hidden_size).astype(np.float32)
    return vector / np.linalg.norm(vector) * 2


def schedule_of(events: list[Any], first: float, tokens: int, where: tuple[int, int] = (0, 0)) -> list[float]:
    """Which `alpha` held for each token of a choice, by what the events say."""
    values = [first] * tokens
    for event in events:
        if isinstance(event, Steered):
            starts = {(place.invoke, place.choice): place.index for place in event.first}
            new = [change.values["alpha"] for change in event.changes if "alpha" in change.values]
            if new and where in starts:
                values[starts[where] :] = [new[-1]] * (tokens - starts[where])
    return values


def check_order(events: list[Any]) -> None:
    """Outputs with a token that a change holds for come after its event, all others before it; versions go up."""
    seen: dict[tuple[int, int], int] = {}
    version = 0
    for event in events:
        if isinstance(event, Output):
            seen[event.invoke, event.choice] = event.index + len(event.token_ids)
        elif isinstance(event, Steered):
            assert event.version > version
            assert [change.version for change in event.changes] == list(range(version + 1, event.version + 1))
            version = event.version
            for place in event.first:
                assert seen.get((place.invoke, place.choice), 0) <= place.index


async def steer_along(trace: Any, values: list[float], every: int, *, in_turn: bool = False) -> list[Any]:
    """All items of a trace, steering it with each of `values` after every so many tokens.

    With `in_turn`, each is sent when it has been told where the one before holds: no two hold from one token on.
    """
    items, tokens, told, sent = [], 0, 0, 0
    async for item in trace:
        items.append(item)
        told += isinstance(item, Steered)
        if isinstance(item, Output):
            tokens += len(item.token_ids)
            while sent < len(values) and tokens >= every * (sent + 1) and not (in_turn and told < sent):
                await trace.steer(alpha=values[sent])
                sent += 1
    return items
