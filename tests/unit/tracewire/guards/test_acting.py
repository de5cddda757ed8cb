"""What a guard does about an alarm: pausing, deciding, acting, within its budget; and what it does when that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info
from tests.support.clients import events_of
from tests.support.until import until
from tracewire import Alarm, Client, Decision, Paused, Resumed, Steered
from tracewire.guards.acting import Acting, Guarding
from tracewire.guards.audit import AuditLine

from .conftest import Guarded, Watched

PATIENCE = 60
RULE = {"save": "score", "output": None, "above": 4.5}
BY = "guard:guards/high"


class Story:
    """A trace of ten tokens with the scores 0 to 9. After token 5 it waits until `handled` is set, and is not held."""

    def __init__(self) -> None:
        self.handled = anyio.Event()

    async def __call__(self, stage: Stage) -> None:
        """The script."""
        await stage.accept()
        for number in range(10):
            await stage.save("x", {"score": float(number)})
            if number == 5:
                await self.handled.wait()
                await stage.going()
        await stage.final()


@asynccontextmanager
async def told(client: Client, guarded: Guarded, kind: type[Watched] = Watched, **given: Any) -> AsyncIterator[Any]:
    """A trace with an alarm at token 5, which a guard handles: the line of its audit, and the trace's id."""
    given["rule"] = {**RULE, **given.get("rule", {})}
    url, prefix = client.url, client._session.open_bus().keys.prefix
    story = Story()
    with anyio.fail_after(PATIENCE):
        async with guarded(kind, **given) as guard, BusEngine.running(url, prefix, story, engine_info()):
            async with client.trace("tiny", "x", live={"alpha": 1.0}, detach=True) as trace:
                await until(lambda: guard.lines)
                yield guard.lines[0], trace.id
                story.handled.set()
                await trace.until_done()
            await until(lambda: not guard.following)
            assert len(guard.lines) == 1


def kinds(events: list[Any]) -> list[type]:
    return [type(event) for event in events if isinstance(event, Paused | Resumed | Steered)]


async def test_a_trace_is_paused_steered_and_resumed(client: Client, guarded: Guarded) -> None:
    async with told(client, guarded, rule={"do": "steer", "live": {"alpha": 0.0}, "reason": "too high"}) as (
        line,
        trace,
    ):
        pass
    assert (line.outcome, line.do, line.live, line.reason) == ("done", "steer", {"alpha": 0.0}, "too high")
    assert (line.alarm.token, line.alarm.value, line.alarm.text, line.paused) == (5, 5.0, "xxxxxx", True)
    events = await events_of(client, trace)
    assert kinds(events) == [Paused, Resumed, Steered]
    assert {event.by for event in events if isinstance(event, Paused | Resumed)} == {BY}
    assert next(event for event in events if isinstance(event, Steered)).changes[0].by == BY


async def test_a_trace_is_cancelled_without_a_pause(client: Client, guarded: Guarded) -> None:
    async with told(client, guarded, rule={"do": "cancel"}) as (line, trace):
        pass
    assert (line.outcome, line.do, line.paused) == ("done", "cancel", False)
    final = (await events_of(client, trace))[-1]
    assert final.error.reason == "high: score is 5 at token 5"
    assert final.error.by == BY


async def test_a_dry_run_touches_nothing(client: Client, guarded: Guarded) -> None:
    async with told(client, guarded, dry_run=True, rule={"do": "cancel"}) as (line, trace):
        pass
    assert (line.outcome, line.do) == ("dry run", "cancel")
    events = await events_of(client, trace)
    assert kinds(events) == []
    assert events[-1].status == "finished"


class Asked(Watched):
    """A guard whose subclass decides."""

    answer: Any = Decision("resume")

    async def decide(self, alarm: Alarm) -> Decision:
        """Whatever the test says."""
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await anyio.sleep_forever()
        return self.answer


def asked(answer: Any) -> type[Asked]:
    return type("Asking", (Asked,), {"answer": answer})


async def test_a_subclass_decides(client: Client, guarded: Guarded) -> None:
    async with told(client, guarded, asked(Decision("cancel", reason="no")), rule={"do": "resume"}) as (line, _):
        assert (line.outcome, line.do, line.reason, line.asked) == ("done", "cancel", "no", "decide")


@pytest.mark.parametrize(
    ("answer", "said"),
    [(None, "no answer within 0.05 s"), (RuntimeError("it broke"), "no decision: RuntimeError: it broke")],
)
@pytest.mark.parametrize("then", ["resume", "cancel"])
async def test_without_an_answer_the_rule_decides(
    client: Client, guarded: Guarded, answer: Any, said: str, then: str
) -> None:
    rule = {"do": "resume", "timeout": 0.05, "on_timeout": then}
    async with told(client, guarded, asked(answer), rule=rule) as (line, trace):
        pass
    assert (line.outcome, line.do, line.reason) == ("no answer", then, said)
    events = await events_of(client, trace)
    assert kinds(events) == ([Paused, Resumed] if then == "resume" else [Paused])
    assert events[-1].status == ("finished" if then == "resume" else "cancelled")


async def test_a_decision_that_cannot_be_done_is_replaced_by_the_rules(client: Client, guarded: Guarded) -> None:
    rule = {"do": "steer", "live": {"beta": 0.0}, "on_timeout": "cancel"}
    async with told(client, guarded, rule=rule) as (line, trace):
        pass
    assert (line.outcome, line.do) == ("failed", "cancel")
    assert "beta" in line.reason
    assert (await events_of(client, trace))[-1].status == "cancelled"


@pytest.mark.parametrize(("beyond", "do"), [("ignore", ""), ("cancel", "cancel"), ("pause", "resume")])
async def test_beyond_the_budget(client: Client, guarded: Guarded, beyond: str, do: str) -> None:
    """A budget that an earlier trace has used up."""
    budget = {"actions_per_minute": 1, "beyond": beyond}
    lines: list[AuditLine] = []
    url, prefix = client.url, client._session.open_bus().keys.prefix
    story = Story()
    story.handled.set()
    with anyio.fail_after(PATIENCE):
        async with (
            guarded(rule={**RULE, "do": "resume", "timeout": 0.01}, budget=budget) as guard,
            BusEngine.running(url, prefix, story, engine_info()),
        ):
            first = client.trace("tiny", "x", detach=True)
            await first.until_done()
            await until(lambda: guard.lines)
            story.handled = anyio.Event()
            second = client.trace("tiny", "x", detach=True)
            await second.start()
            await until(lambda: len(guard.lines) == 2)
            lines = guard.lines[:]
            if beyond == "pause":
                # The script's engine ends no pauses.
                assert await client.resume(second.id, paused_by=BY)
            story.handled.set()
            await second.until_done()
    reason = "high: beyond the guard's budget" if beyond == "cancel" else "beyond actions_per_minute"
    assert (lines[1].outcome, lines[1].do, lines[1].reason) == ("over budget", do, reason)
    assert lines[1].paused is (beyond == "pause")


async def test_a_pause_of_somebody_else_stays(client: Client, guarded: Guarded) -> None:
    rule = {"do": "steer", "live": {"alpha": 0.0}}
    url, prefix = client.url, client._session.open_bus().keys.prefix
    story = Story()
    with anyio.fail_after(PATIENCE):
        async with (
            BusEngine.running(url, prefix, story, engine_info()),
            client.trace("tiny", "x", live={"alpha": 1.0}, detach=True) as trace,
        ):
            await trace.accepted()
            assert await trace.pause(by="person")
            async with guarded(rule={**RULE, **rule}) as guard:
                await until(lambda: guard.lines)
                (line,) = guard.lines
            assert (line.outcome, line.do, line.paused) == ("done", "steer", False)
            assert await trace.resume(paused_by="person")
            story.handled.set()
            await trace.until_done()


async def test_an_alarm_on_a_trace_that_has_ended_is_late(client: Client, guarded: Guarded) -> None:
    url, prefix = client.url, client._session.open_bus().keys.prefix
    story = Story()
    story.handled.set()
    with anyio.fail_after(PATIENCE):
        async with BusEngine.running(url, prefix, story, engine_info()):
            await client.trace("tiny", "x", detach=True).until_done()
        async with guarded(rule={**RULE, "do": "resume"}) as guard:
            await until(lambda: guard.lines)
            assert guard.lines[0].outcome == "late"
            assert "has ended" in guard.lines[0].reason


@pytest.mark.usefixtures("registered")
async def test_a_pause_waits_for_redis(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Redis does not answer, the guard asks again: no alarm is dropped."""
    from tracewire.guards.audit import GuardAudit
    from tracewire.guards.rules import read_rules
    from tracewire_bus.store.guard_marks import GuardMarks

    bus = client._session.open_bus()
    rules = read_rules({"model": "tiny", "rules": [{"name": "high", "save": "s", "above": 1.0, "do": "resume"}]})
    lines: list[AuditLine] = []

    async def decide(alarm: Alarm) -> Decision:
        return Decision("resume")

    async def decided(line: AuditLine) -> None:
        lines.append(line)

    acting = Acting(Guarding(client, rules, "g", decide, decided), GuardMarks(bus), GuardAudit("", bus))
    away = [tracewire.BusUnavailable("away") for _ in range(2)]
    for error in away:
        error.retry_after = 0.0
    pause = client.pause

    async def failing(*args: Any, **more: Any) -> bool:
        if away:
            raise away.pop()
        return await pause(*args, **more)

    monkeypatch.setattr(client, "pause", failing)
    async with client.trace("tiny", "x", detach=True) as trace:
        alarm = Alarm(trace_id=trace.id, model="tiny", rule="high", save="s", token=3, value=2.0)
        await acting.handle(rules.rules[0], alarm)
        assert await trace.cancel()
    assert not away
    assert [(line.outcome, line.paused) for line in lines] == [("done", True)]
    assert await acting.decided_marks(trace.id) == {alarm.mark}
