"""A request that fails in the engine fails its trace, in the terms in which it failed."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.lost_reports import NOTHING, Reporting, begun
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_engine.adapter.engine_api import Prepared, Rejection
from tracewire_engine.protocol.messages import Report, StepRecord


@pytest.mark.usefixtures("registered")
async def test_what_engine_core_alone_finds_out_fails_the_trace_and_no_other(
    client: Client, embedded: str, prefix: str
) -> None:
    engine = PlayedEngine()

    async def refused() -> Any:
        raise Rejection("sampling.structured_outputs", "no grammar")

    async with adapted(embedded, prefix, engine), client.trace("tiny", "good", detach=True) as good:
        await good.accepted()
        (first,) = engine.requests
        async with client.trace("tiny", "bad", detach=True) as bad:
            await bad.accepted()
            (second,) = engine.requests.keys() - {first}
            engine.requests[second].get = refused  # type: ignore[method-assign]
            engine.requests[second].put("x")
            with pytest.raises(tracewire.TraceFailed, match="no grammar"):
                await bad.result()
            assert ("abort", second) in engine.asked
            engine.finish(first)
            assert (await good.result()).text == "x"


PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_what_several_invokes_fail_of_is_told_as_it_was_raised(
    client: Client, embedded: str, prefix: str
) -> None:
    """Not as a group of one."""

    class Failing(Reporting):
        def decode(self, token_ids: list[int], prepared: Prepared) -> str:
            raise RuntimeError("no such token")

    engine = Failing()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine) as adapter,
            client.trace("tiny", prompts=["one", "two"], block=acts, detach=True) as trace,
        ):
            names = await begun(adapter, trace)
            engine.report(Report(steps=[StepRecord(names[0], 0, 0, NOTHING, "stop")]))
            engine.requests[names[0]].put("x")
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
    assert caught.value.type == "RuntimeError"
    assert caught.value.message == "the adapter failed: no such token"
