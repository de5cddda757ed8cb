"""Engines whose workers' reports do not come, or that do not answer."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from tests.support.played_engine import PlayedEngine
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import TraceRun
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))


#: Longer than any test.
_NEVER_S = 10_000.0


def put(engine: PlayedEngine, request: str, index: int, *, reported: bool = True) -> None:
    """A token, and what its step saved, unless that is lost."""
    if reported:
        engine.report(Report(steps=[StepRecord(request, 0, index, NOTHING)]))
    engine.requests[request].put("x")


class Reporting(PlayedEngine):
    """Its workers report the end of what is aborted, and how many steps there were."""

    steps = 2

    def finish(self, request: str, reason: str = "stop", count: int = 1) -> None:
        """End a request."""
        self.report(Report(finishes=[FinishRecord(request, 0, NOTHING, steps=self.steps)]))
        self.requests[request].put("x" * count, reason, count)


async def begun(adapter: Adapter, trace: Any) -> list[str]:
    """The names of a trace's requests, once it has begun."""
    await trace.accepted()
    run = adapter._claims.runs[trace.id]
    assert isinstance(run, TraceRun)
    return [request.name for request in run.requests]


class Hanging(Reporting):
    """It answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_to_answer = 0

    async def answers(self) -> None:
        """Not in this life."""
        self.asked_to_answer += 1
        await anyio.sleep_forever()
