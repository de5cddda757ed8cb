"""What one trace makes of its activations, infinity and NaN included, is never another request's."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tracewire import Client, Model, Steer

PROMPTS = [
    "def add(a, b):\n    return",
    "import os\nimport sys\n\nclass Path",
    "for name in names:",
    "# A comment on it",
]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


@tracewire.intervention
def scaled(model, tracer, live):
    for _ in tracer.iter[:]:
        hidden, residual = model.model.layers[1].output
        model.model.layers[1].output = (hidden * 1e38 * 1e38, residual)


async def plain(client: Client, model: Model) -> list[list[int]]:
    """What requests without interventions answer that run together."""
    found: dict[int, list[int]] = {}

    async def one(place: int, prompt: str) -> None:
        async with client.trace(model, prompt, **GREEDY) as trace:
            found[place] = (await trace.result()).token_ids

    async with anyio.create_task_group() as group:
        for place, prompt in enumerate(PROMPTS):
            group.start_soon(one, place, prompt)
    return [found[place] for place in range(len(PROMPTS))]


@pytest.mark.parametrize("how", ["block", "declared"])
async def test_kv_that_is_not_finite_reaches_no_later_request(client: Client, model: Model, how: str) -> None:
    before = await plain(client, model)
    vector = np.full(model.info.hidden_size, 3e38, np.float32)
    traced: dict[str, Any] = {"block": scaled} if how == "block" else {"interventions": [Steer("residual(1)", vector)]}

    async def poison(prompt: str) -> None:
        async with client.trace(model, prompt, **traced, **GREEDY) as trace:
            # What it reads of this itself is its own affair.
            assert (await trace.result()).finish_reason == "length"

    async with anyio.create_task_group() as group:
        for prompt in PROMPTS:
            group.start_soon(poison, prompt)
    for _ in range(5):
        assert await plain(client, model) == before
