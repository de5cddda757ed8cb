"""A report of the workers that never comes: its trace ends, and so does one that is told to, whatever is missing."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.lost_reports import _NEVER_S, NOTHING, Reporting, begun, put
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_engine.adapter import pending
from tracewire_engine.protocol.messages import FinishRecord, Report

PATIENCE = 60


@pytest.mark.usefixtures("registered")
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
            client.trace("tiny", "hello", acts, detach=True, on_engine_loss="fail") as trace,
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
            with pytest.raises(tracewire.TraceFailed, match="the workers' report of token 1 was lost") as caught:
                await trace.result()
            assert caught.value.status == "failed"
            assert ("abort", request) in engine.asked
            put(engine, another, 0)
            engine.steps = 1
            engine.finish(another, count=0)
            assert (await other.result()).text == "x"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("when", ["of a token", "behind the last token"])
async def test_a_trace_runs_again_whose_end_came_without_what_its_block_had_saved(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, prompts: int, when: str
) -> None:
    """The process between them was killed, and the end went another way."""
    monkeypatch.setattr(pending, "LATE_S", 0.01)
    engine = Reporting()
    options = {"detach": True, "max_attempts": 2}
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, engine_patience_s=_NEVER_S) as adapter,
            client.trace("tiny", prompts=["hello", "others"][:prompts], block=acts, **options) as trace,
        ):
            first = await begun(adapter, trace)
            engine.started = anyio.Event()
            for request in first:
                put(engine, request, 0)
            engine.steps = 1
            if when == "of a token":
                put(engine, first[0], 1, reported=False)
            else:
                engine.requests[first[0]].put("", "stop", 0)
                for request in first[1:]:
                    engine.finish(request, count=0)
            engine.report(Report(finishes=[FinishRecord(first[0], 0, NOTHING, steps=2)]))
            await engine.started.wait()
            if when == "of a token":
                # The other prompt's request is no longer needed.
                assert [what for what in engine.asked if what[0] == "abort"] == [("abort", one) for one in first]
            events = aiter(client.subscribe(trace.id, since="start"))
            while not isinstance(await anext(events), tracewire.Restarted):
                pass
            assert isinstance(await anext(events), tracewire.Accepted)
            for request in [one for one in engine.requests if one not in first]:
                put(engine, request, 0)
                engine.finish(request, count=0)
            result = await trace.result()
            assert [one.choices[0].text for one in result.invokes] == ["x"] * prompts


@pytest.mark.usefixtures("registered")
async def test_a_trace_that_is_cancelled_while_its_saves_are_missing_does_not_run_again(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "ENDING_S", 0.01)
    monkeypatch.setattr(pending.PendingChoice, "has_gap", lambda self, reads: False)
    engine = Reporting()
    with anyio.fail_after(PATIENCE):
        async with (
            adapted(embedded, prefix, engine, engine_patience_s=_NEVER_S) as adapter,
            client.trace("tiny", "hello", acts, detach=True, max_attempts=2) as trace,
        ):
            (request,) = await begun(adapter, trace)
            put(engine, request, 0)
            engine.requests[request].put("", "stop", 0)
            engine.report(Report(finishes=[FinishRecord(request, 0, NOTHING, steps=2)]))
            async for output in trace:
                if output.finish_reason:
                    break
            await trace.cancel()
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
            assert caught.value.status == "cancelled"
            assert list(engine.requests) == [request]
            events = [event async for event in client.subscribe(trace.id, since="start")]
            assert not [event for event in events if isinstance(event, tracewire.Restarted)]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_cancel_and_deadline_get_through_to_a_trace_that_waits_for_a_lost_report(
    client: Client, embedded: str, prefix: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(pending, "LATE_S", _NEVER_S)
    monkeypatch.setattr(pending, "ENDING_S", 0.01)
    # Whether it is lost nobody can tell: the end that is reported is one behind large arrays.
    monkeypatch.setattr(pending.PendingChoice, "has_gap", lambda self, reads: False)
    engine = Reporting()
    deadline = 2.0 if how == "expired" else None
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


@pytest.mark.usefixtures("registered")
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
