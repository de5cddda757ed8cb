"""What the requests of one gateway share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.support.bus_engine import tiny
from tests.support.gateways import Served
from tracewire import UnknownModel, UnknownTrace
from tracewire.gateway.keys import Caller
from tracewire.gateway.problems import RETRY_AFTER_S, Problem

Engine = Callable[..., Any]


async def test_draining_waits_for_what_runs_and_no_longer_than_it_may(gateway: Callable[..., Any]) -> None:
    async with gateway(drain_s=60.0) as served:
        state = served.gateway
        order = []
        async with anyio.create_task_group() as group:
            with state.counted():
                group.start_soon(state.drain)
                while not state.closing:
                    await anyio.lowlevel.checkpoint()
                order.append("running")
            order.append("idle")
        assert order == ["running", "idle"]
        assert state.running == 0
    async with gateway(drain_s=60.0) as served:
        state = served.gateway
        async with anyio.create_task_group() as group:
            with state.counted():
                group.start_soon(state.drain)
                while not state.closing:
                    await anyio.lowlevel.checkpoint()
                state.hurry()
                # It ends though the request still runs.
                while state._draining is not None and not state._draining.cancelled_caught:
                    await anyio.lowlevel.checkpoint()


async def test_a_bus_that_does_not_answer_is_a_status(gateway: Callable[..., Any]) -> None:
    async with gateway(patience_s=0.01) as served:
        with pytest.raises(Problem, match=r"has not answered within 0\.01 s") as slow, served.gateway.patience():
            await anyio.sleep_forever()
        assert (slow.value.status, slow.value.retry_after) == (503, RETRY_AFTER_S)


async def test_an_adapter_s_name_is_found_and_remembered(engine: Engine, served: Served) -> None:
    state = served.gateway
    async with engine(tiny, loras=["french"]):
        assert state.base_of("french") == ("french", None)
        assert await state.find_base(UnknownModel("french", ["tiny"])) == ("tiny", "french")
        assert state.base_of("french") == ("tiny", "french")
        with pytest.raises(UnknownModel, match="german"):
            await state.find_base(UnknownModel("german", ["tiny"]))


async def test_a_tenant_s_traces_are_unknown_to_others(served: Served) -> None:
    red, operator = Caller("alice", tenant="red"), Caller("root")
    served.gateway.check_visible(red, "red:one")
    served.gateway.check_visible(operator, "blue:one")
    for other in ("blue:one", "one", "redder:one"):
        with pytest.raises(UnknownTrace):
            served.gateway.check_visible(red, other)
