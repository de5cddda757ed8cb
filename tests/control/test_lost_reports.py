"""A report of the workers that never comes: its trace ends, and so does one that is told to, whatever is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_engine.adapter import pending
from tracewire_engine.adapter.engine_api import EngineLost, Prepared
from tracewire_engine.adapter.service import Adapter
from tracewire_engine.adapter.trace_run import TraceRun
from tracewire_engine.protocol.messages import FinishRecord, Report, StepRecord

PATIENCE = 30
NOTHING = msgspec.Raw(msgspec.msgpack.encode([]))
#: Longer than any test.
_NEVER_S = 10_000.0


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which a model is known."""
    await bus.registry.register(engine_info(), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


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


@pytest.mark.parametrize("what", ["a later step", "the end", "nothing"])
async def test_a_trace_whose_report_was_lost_ends_with_an_error_and_the_others_go_on(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What comes after it shows so at once; else its time runs out."""
    monkeypatch.setattr(pending, "LATE_S", 0.01)
    engine = Reporting()
    patience_s = 0.1 if what == "nothing" else _NEVER_S
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, engine_patience_s=patience_s) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as trace,
            client.trace("tiny", "other", acts, detach=True) as other,
        ):
            (request,) = await begun(adapter, trace)
            (another,) = await begun(adapter, other)
            put(engine, request, 0)
            put(engine, request, 1, reported=False)
            if what == "a later step":
                put(engine, request, 2)
            elif what == "the end":
                engine.steps = 2
                engine.finish(request, count=0)
            with pytest.raises(tracewire.TraceFailed, match="what the workers reported of token 1 was lost") as caught:
                await trace.result()
            assert caught.value.status == "failed"
            assert ("abort", request) in engine.asked
            put(engine, another, 0)
            engine.steps = 1
            engine.finish(another, count=0)
            assert (await other.result()).text == "x"


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_cancel_and_deadline_get_through_to_a_trace_that_waits_for_a_lost_report(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(pending, "LATE_S", _NEVER_S)
    monkeypatch.setattr(pending, "ENDING_S", 0.01)
    # Whether it is lost nobody can tell: the end that is reported is one behind large arrays.
    monkeypatch.setattr(pending.PendingChoice, "has_gap", lambda self, reads: False)
    engine = Reporting()
    deadline = 0.5 if how == "expired" else None
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, engine_patience_s=_NEVER_S) as adapter,
            client.trace("tiny", "hello", acts, detach=True, deadline=deadline) as trace,
        ):
            (request,) = await begun(adapter, trace)
            put(engine, request, 0)
            put(engine, request, 1, reported=False)
            if how == "cancelled":
                await trace.cancel()
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
            assert caught.value.status == how


async def test_a_lost_report_of_an_engine_that_does_not_answer_is_an_engine_lost(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Its traces wait for another one; they do not fail."""

    class Stuck(Reporting):
        async def takes_requests(self) -> bool:
            return False

    engine = Stuck()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine, engine_patience_s=0.1) as adapter:
            async with client.trace("tiny", "hello", acts, detach=True) as trace:
                (request,) = await begun(adapter, trace)
            put(engine, request, 0, reported=False)
            await adapter.ended.wait()
            assert adapter.lost
            assert await bus.queue.waiting("tiny") == 1


async def test_what_waits_for_redis_behind_large_arrays_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracewire_engine.adapter import report_router as reports

    monkeypatch.setattr(reports, "_LOOK_S", 0.0)
    records = pending.PendingRecords(1, "t")
    table = {"r": records}
    taken = reports.ReportRouter(PlayedEngine(), table, 0)
    taken.held_up = True
    async with anyio.create_task_group() as group:
        group.start_soon(taken.watch, 0.01)
        waiting = anyio.Event()

        async def wait() -> None:
            await records.wait_finished()
            waiting.set()

        group.start_soon(wait)
        with anyio.move_on_after(0.2):
            await waiting.wait()
        assert not records.given_up
        taken.held_up = False
        with anyio.fail_after(PATIENCE):
            await waiting.wait()
        assert records.given_up
        group.cancel_scope.cancel()


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


class Hanging(Reporting):
    """It answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_to_answer = 0

    async def answers(self) -> None:
        """Not in this life."""
        self.asked_to_answer += 1
        await anyio.sleep_forever()


async def test_an_engine_that_hangs_loses_its_lease_and_its_traces(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    """Its adapter lives, and would renew it for ever."""
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, Hanging(), engine_patience_s=0.2) as adapter,
            client.trace("tiny", "hello", acts, detach=True) as trace,
        ):
            await trace.accepted()
            await adapter.ended.wait()
            assert adapter.lost
            assert await bus.queue.waiting("tiny") == 1
            assert not await bus.registry.alive(adapter._info.engine)


async def test_an_engine_that_reports_is_not_given_up_whether_or_not_it_answers(embedded: str, prefix: str) -> None:
    """One that was told to stop answers nothing any more, and finishes what it runs."""
    engine = Hanging()
    with anyio.fail_after(PATIENCE):
        async with adapted(embedded, prefix, engine, engine_patience_s=0.2) as adapter:
            while engine.asked_to_answer < 5:
                engine.report(Report())
                adapter._reports.pull()
                await anyio.lowlevel.checkpoint()
            assert not adapter.lost


async def test_no_call_of_vllm_is_waited_for_without_a_limit() -> None:
    """vLLM fails no call that is under way when its EngineCore dies."""
    from tracewire_engine.adapter.vllm_engine import VllmEngine

    class Silent:
        """An `AsyncLLM` whose EngineCore is gone."""

        def __init__(self) -> None:
            self.engine_core = self
            self.output_processor = self
            self.external_req_ids = {"r": ["r-1"]}

        async def collective_rpc(self, method: str, args: Any) -> None:
            await anyio.sleep_forever()

        async def call_utility_async(self, method: str, *args: Any) -> None:
            await anyio.sleep_forever()

    engine = VllmEngine.__new__(VllmEngine)
    engine.llm, engine._patience_s = Silent(), 0.01
    calls = [
        engine.pause("r"),
        engine.resume("r"),
        engine.pause_all(),
        engine.resume_all(),
        engine.give_result(b""),
        engine.steer({}, [], 0.0),
        engine._call_workers("tracewire_drop_input", "x"),
    ]
    with anyio.fail_after(PATIENCE):
        for call in calls:
            with pytest.raises(EngineLost, match="did not answer"):
                await call
