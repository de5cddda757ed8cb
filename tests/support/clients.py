"""What a client reads of traces, within a time limit."""

from __future__ import annotations

from typing import Any

import anyio

import tracewire
from tracewire import Client, intervention

PATIENCE = 60


async def collected(source: Any) -> list[Any]:
    with anyio.fail_after(PATIENCE):
        return [item async for item in source]


def texts(items: list[Any]) -> list[str]:
    return [item.text for item in items if isinstance(item, tracewire.Output)]


@intervention
def watch(model, tracer, live, direction=1.0):
    scores = [].save()
    for step in tracer.iter[:]:
        scores.append(model.model.layers[2].output[0].sum().item() * direction)


async def events_of(client: Client, trace: str) -> list[Any]:
    """All events of a trace, which ends."""
    with anyio.fail_after(PATIENCE):
        return [event async for event in client.subscribe(trace)]
