"""A guard over many traces: it misses nothing, whether it lives or is killed, alone or in a group."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support import ROOT
from tests.support.cells import blocks, run_cell
from tests.support.guards import alarms_of, audited, ended, guard_process, rules, write_rules
from tests.support.scripted_engine import ScriptedEngine, acts, info, serving
from tests.support.stepping import Gate
from tests.support.until import until
from tracewire import Client, Guard, Paused, Resumed
from tracewire.guards.rules import read_rules
from tracewire_bus.bus import Bus
from tracewire_bus.store.watch_groups import GroupWatch
from tracewire_bus.transport.errors import BusUnavailable

from .conftest import Guarded

PAGE = ROOT / "docs" / "guards.md"
PATIENCE = 120
TOKENS = 30
CANCEL = {"do": "cancel"}


def ran(traces: int) -> dict[str, list[int]]:
    """The ids of so many traces, and the tokens at which each sets off an alarm."""
    return {f"t{number}": alarms_of(f"t{number}", TOKENS) for number in range(traces)}


async def run_traces(client: Client, names: Any) -> None:
    """Run a trace for each of these names at once, to its end."""

    async def one(name: str) -> None:
        assert await client.trace("tiny", name, acts, max_tokens=TOKENS, trace_id=name, detach=True).until_done()

    await client.models.get("tiny", timeout=PATIENCE)
    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(one, name)


def found(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The tokens of the alarms in an audit, by trace, each once."""
    by_trace: dict[str, set[int]] = {}
    for line in lines:
        by_trace.setdefault(line["alarm"]["trace_id"], set()).add(line["alarm"]["token"])
    return {trace: sorted(tokens) for trace, tokens in by_trace.items()}


def expected(alarms: dict[str, list[int]]) -> dict[str, list[int]]:
    return {trace: tokens for trace, tokens in alarms.items() if tokens}


async def test_nothing_is_missed_over_200_running_traces(client: Client, bus: Bus, guarded: Guarded) -> None:
    alarms = ran(200)
    assert sum(map(len, alarms.values())) > 200
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, ScriptedEngine(partial(anyio.sleep, 0.02)), info(capacity=256)),
            guarded(since="now") as guard,
        ):
            await run_traces(client, alarms)
            await until(lambda: _nothing_pending(bus))
            lines = [_plain(line) for line in guard.lines]
        assert found(lines) == expected(alarms)
        # Once each, and the trace waited each time.
        assert len(lines) == sum(map(len, alarms.values()))
        # Some alarms are at the last tokens of traces, which ended before they could be paused.
        assert {line["outcome"] for line in lines} <= {"done", "late"}
        paused = [line for line in lines if line["paused"] and line["outcome"] == "done"]
        trace = paused[0]["alarm"]["trace_id"]
        events = [event async for event in client.subscribe(trace)]
        own = [line for line in paused if line["alarm"]["trace_id"] == trace]
        assert sum(isinstance(event, Paused) for event in events) >= len(own) > 0
        assert sum(isinstance(event, Resumed) for event in events) >= len(own)


def _plain(line: Any) -> dict[str, Any]:
    return {
        "alarm": {"trace_id": line.alarm.trace_id, "token": line.alarm.token},
        "outcome": line.outcome,
        "paused": line.paused,
    }


async def test_a_guard_is_killed_and_started_again_in_the_middle(client: Client, bus: Bus, tmp_path: Path) -> None:
    """By SIGKILL, under load. It takes its traces up where it was: those that it had paused go on, too."""
    alarms, audit, path = ran(200), tmp_path / "audit.jsonl", tmp_path / "rules.toml"
    write_rules(path, rules(audit=str(audit), since="now", rule={"timeout": 300.0}))
    where = client.url, bus.keys.prefix
    with anyio.fail_after(PATIENCE):
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.05)), info(capacity=256)):
            process = guard_process(*where, path, "g")
            try:
                await until(lambda: _has_begun(bus))
                async with anyio.create_task_group() as group:
                    group.start_soon(run_traces, client, alarms)
                    await until(lambda: len(audited(audit)) > 50)
                    ended(process)
                    before = len(audited(audit))
                    assert before < sum(map(len, alarms.values())), "it was killed too late to tell anything"
                    # A torn line stays by itself.
                    audit.write_bytes(audit.read_bytes().rpartition(b"\n")[0] + b"\n")
                    process = guard_process(*where, path, "g")
                await until(lambda: found(audited(audit)) == expected(alarms))
                await until(lambda: _nothing_pending(bus))
            finally:
                ended(process)
    counted = Counter((line["alarm"]["trace_id"], line["alarm"]["token"]) for line in audited(audit))
    # What was in hand when it was killed is handled again, and nothing else.
    assert sum(counted.values()) - len(counted) < 50
    for name in alarms:
        assert (await client.get_state(name)).status == "finished"


async def _nothing_pending(bus: Bus) -> bool:
    """Whether the group has read all events, and acknowledged them."""
    groups = [await bus.command("XINFO", "GROUPS", bus.keys.firehose(tag)) for tag in bus.keys.tags]
    ends = [await bus.command("XREVRANGE", bus.keys.firehose(tag), "+", "-", "COUNT", 1) for tag in bus.keys.tags]
    told = [dict(zip(found[0][::2], found[0][1::2], strict=True)) for found in groups]
    return all(
        not one[b"pending"] and (not end or one[b"last-delivered-id"] == end[0][0])
        for one, end in zip(told, ends, strict=True)
    )


async def _has_begun(bus: Bus) -> bool:
    """Whether the group is on all streams."""
    found = [await bus.command("EXISTS", bus.keys.firehose(tag)) for tag in bus.keys.tags]
    return all(found)


def up_to(alarm: str) -> Gate:
    """Lets an engine step up to the first alarm of a trace and no further, until the gate is opened.

    A guard that is slow comes too late for the trace otherwise.
    """
    gate = Gate()
    gate.step(alarms_of(alarm, TOKENS)[0] + 1)
    return gate


async def test_what_a_dead_guard_paused_is_taken_over_by_another(
    client: Client, bus: Bus, guarded: Guarded, tmp_path: Path
) -> None:
    """It asks somebody who never answers, and is killed; the other of its group decides."""
    name = next(name for name, tokens in ran(200).items() if tokens and tokens[0] < 10)
    gate = up_to(name)
    path = tmp_path / "rules.toml"
    write_rules(path, rules(idle=1.0, rule={"timeout": 300.0, "do": None, "ask": "terminal"}))
    process = guard_process(client.url, bus.keys.prefix, path, "dead")
    with anyio.fail_after(PATIENCE):
        try:
            async with serving(bus, ScriptedEngine(gate), info()):
                await client.models.get("tiny", timeout=PATIENCE)
                trace = client.trace("tiny", name, acts, max_tokens=TOKENS, trace_id=name, detach=True)
                await until(lambda: _has_begun(bus))
                async for item in trace:
                    if isinstance(item, Paused):
                        ended(process)
                        break
                gate.open()
                async with guarded(idle=1.0) as guard:
                    assert await trace.until_done() == "finished"
                    await until(lambda: _nothing_pending(bus))
                    assert found([_plain(line) for line in guard.lines]) == {name: alarms_of(name, TOKENS)}
        finally:
            ended(process)


async def test_a_guard_whose_acknowledgement_redis_does_not_answer_asks_again(
    client: Client, bus: Bus, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with its other traces, and acknowledges this one when Redis is back."""
    alarms = {name: tokens for name, tokens in ran(20).items() if tokens}
    whole, refused = GroupWatch.acknowledge, list[Any]()

    async def acknowledge(self: GroupWatch, place: Any) -> None:
        if len(refused) < 2:
            refused.append(place)
            raise BusUnavailable("away")
        await whole(self, place)

    monkeypatch.setattr(GroupWatch, "acknowledge", acknowledge)
    with anyio.fail_after(PATIENCE):
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.005)), info(capacity=64)), guarded() as guard:
            await run_traces(client, alarms)
            await until(lambda: _nothing_pending(bus))
            assert found([_plain(line) for line in guard.lines]) == alarms
            await until(lambda: not guard.following)
    assert len(refused) == 2


@pytest.mark.parametrize("then", ["resume", "cancel"])
async def test_the_engine_ends_the_pause_of_a_guard_that_has_died(
    client: Client, bus: Bus, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes it over: after the rule's timeout and a grace, the engine does what the rule says."""
    from tracewire.guards import acting

    monkeypatch.setattr(acting, "_GRACE_S", 0.1)

    class Stuck(Guard):
        async def decide(self, alarm: tracewire.Alarm) -> tracewire.Decision:
            died.cancel()
            await anyio.sleep_forever()
            raise AssertionError

    name = next(name for name, tokens in ran(200).items() if len(tokens) == 1 and tokens[0] < 10)
    gate = up_to(name)
    with anyio.fail_after(PATIENCE):
        async with serving(bus, ScriptedEngine(gate), info()):
            await client.models.get("tiny", timeout=PATIENCE)
            trace = client.trace("tiny", name, acts, max_tokens=TOKENS, trace_id=name, detach=True)
            with anyio.CancelScope() as died:
                guard = Stuck(client, rules(rule={"timeout": 0.3, "on_timeout": then}), name="g")
                async with anyio.create_task_group() as group:
                    group.start_soon(guard.run)
                    await trace.until_done()
            gate.open()
            # A cancelled guard does not resume what it has paused if it cannot.
            assert await trace.until_done() == ("finished" if then == "resume" else "cancelled")


async def test_names_and_rules_are_checked(client: Client) -> None:
    with pytest.raises(ValueError, match="name: expected a name"):
        Guard(client, rules(), name="")
    with pytest.raises(tracewire.InvalidRules):
        Guard(client, {"model": "m", "rules": []})
    assert "0 traces" in repr(Guard(client, rules(), name="g"))


@pytest.mark.parametrize("text", blocks(PAGE, "toml"))
def test_the_rules_of_the_page_are_right(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    assert read_rules(path).rules


async def test_the_code_of_the_page_runs(client: Client, bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    """Its guard cancels a trace; the block that runs it ends with the test."""
    name = next(name for name, tokens in ran(200).items() if tokens and tokens[0] < 10)
    (code,) = blocks(PAGE, "python")
    with anyio.fail_after(PATIENCE):
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.02)), info()), anyio.create_task_group() as group:
            await client.models.get("tiny", timeout=PATIENCE)
            group.start_soon(partial(run_cell, code, "<guards>", {"client": client, "rules": rules(rule=CANCEL)}))
            # It runs until it is cancelled, however slow the guard is.
            trace = client.trace("tiny", name, acts, max_tokens=100_000, trace_id=name, detach=True)
            assert await trace.until_done() == "cancelled"
            await until(lambda: _nothing_pending(bus))
            group.cancel_scope.cancel()
    assert "done cancel" in capsys.readouterr().out
