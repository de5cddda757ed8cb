"""`schedule=` and `forced_tokens=` of a trace, as the client checks them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tracewire
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.packing import unpack

pytestmark = pytest.mark.usefixtures("registered")


def made(client: Client, **options: Any) -> Any:
    given = {"live": {"alpha": 0.0}, **options}
    prompt = () if "prompts" in options else ("hello",)
    return client.trace("tiny", *prompt, **given)._submission


async def test_a_schedule_is_in_the_order_of_tokens(client: Client) -> None:
    sent = made(client, schedule={9: {"alpha": 2.0}, 4: {"alpha": 1.0}}, forced_tokens=np.array([1, 2]))
    assert [(change.index, unpack(change.values)) for change in sent.schedule] == [
        (4, {"alpha": 1.0}),
        (9, {"alpha": 2.0}),
    ]
    assert sent.invokes[0].forced_tokens == [1, 2]
    several = made(client, prompts=["a", "b"], forced_tokens=[[1], []])
    assert [invoke.forced_tokens for invoke in several.invokes] == [[1], []]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"schedule": [1]}, "schedule"),
        ({"schedule": {-1: {"alpha": 1.0}}}, "schedule"),
        ({"schedule": {"4": {"alpha": 1.0}}}, "schedule"),
        ({"schedule": {4: 1.0}}, "schedule[4]"),
        ({"schedule": {4: {}}}, "schedule[4]"),
        ({"schedule": {4: {"beta": 1.0}}}, "schedule[4].beta"),
        ({"schedule": {4: {"alpha": object()}}}, "schedule[4].alpha"),
        ({"forced_tokens": "abc"}, "forced_tokens"),
        ({"forced_tokens": 5}, "forced_tokens"),
        ({"forced_tokens": [-1]}, "forced_tokens[0]"),
        ({"prompts": ["a", "b"], "forced_tokens": [[1]]}, "forced_tokens"),
        ({"prompts": ["a", "b"], "forced_tokens": [[1], "x"]}, "forced_tokens[1]"),
    ],
)
async def test_what_is_wrong_is_named(client: Client, options: dict[str, Any], field: str) -> None:
    with pytest.raises(tracewire.TraceRejected) as caught:
        made(client, **options)
    assert caught.value.field == field


async def test_an_older_engine_is_not_asked(client: Client, bus: Bus) -> None:
    from tests.support.bus_engine import engine_info

    await bus.registry.register(engine_info("old", engine="old", schema="2.4"), ttl_s=600)
    for option in ({"schedule": {1: {"alpha": 1.0}}}, {"forced_tokens": [1]}):
        with pytest.raises(tracewire.TraceRejected, match="engine old is of a version that knows none"):
            await client.trace("old", "x", live={"alpha": 0.0}, **option).start()
