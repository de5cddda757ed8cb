"""Which number of a save a rule reads, and at which token; across gaps and restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.bus_engine import BusEngine, Stage, engine_info
from tests.support.guards import rules
from tests.support.until import until
from tracewire import Client, Gap, Output
from tracewire.guards.following import FollowedTrace, number_of
from tracewire.guards.rules import read_rules
from tracewire_bus.events.subscription import Gap as EntryGap
from tracewire_bus.store.lifecycle import Lifecycle
from tracewire_bus.store.snapshots import Stored
from tracewire_bus.wire.codec import encode, schema_text
from tracewire_bus.wire.messages import DecodedOutput, HeldChoice, Set, Snapshot
from tracewire_bus.wire.packing import wire

from .conftest import Guarded

PATIENCE = 60


@pytest.mark.parametrize(
    ("item", "output", "number"),
    [
        (3, None, 3.0),
        (True, None, 1.0),
        (2.5, 0, 2.5),
        (np.float32(1.5), None, 1.5),
        (np.array([[7.0]]), None, 7.0),
        (np.array([1.0, 2.0]), 1, 2.0),
        ([4, 5], 0, 4.0),
    ],
)
def test_the_number_of_an_item(item: Any, output: int | None, number: float) -> None:
    assert number_of(item, output) == number


@pytest.mark.parametrize(
    ("item", "output", "said"),
    [
        (np.zeros(3), None, "expected one number, got 3: give output"),
        (np.zeros(3), 3, "expected at least 4 numbers"),
        ("text", None, "expected a number, got str"),
        ([], None, "expected a number, got list"),
        ({"a": 1}, None, "expected a number, got dict"),
        (["a"], None, "expected numbers"),
    ],
)
def test_what_is_no_number_is_named(item: Any, output: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        number_of(item, output)


async def _alarms(client: Client, guarded: Guarded, script: Any, **rule: Any) -> list[tuple[int, int, int, float]]:
    """Attempt, choice, token and value of each alarm of a trace that this script plays."""
    url, prefix = client.url, client._session.open_bus().keys.prefix
    with anyio.fail_after(PATIENCE):
        async with BusEngine.running(url, prefix, script, engine_info()):
            await client.trace("tiny", "x", n=2, detach=True).until_done()
        async with guarded(rule={"save": "s", "output": None, "above": 4.5, "do": "resume", **rule}) as guard:
            await until(lambda: guard._followed or guard.lines)
            await until(lambda: not guard._followed)
        found = [line.alarm for line in guard.lines]
    return [(one.attempt, one.choice, one.token, one.value) for one in found]


async def test_choices_and_attempts_are_apart(client: Client, guarded: Guarded) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for value in (0.0, 5.0, 5.0):
            await stage.save("x", {"s": value})
        await stage.save("y", {"s": 6.0}, choice=1)
        await stage.restart("lost")
        await stage.accept()
        await stage.save("x", {"s": 7.0})
        await stage.final()

    assert await _alarms(client, guarded, script) == [(1, 0, 1, 5.0), (1, 1, 0, 6.0), (2, 0, 0, 7.0)]


def _gap(attempt: int, values: list[float]) -> Gap:
    """A gap that ends within an attempt, each of whose tokens has saved one of these values."""
    held = HeldChoice(0, 0, list(range(len(values))), f"text {attempt}", None, None, {"s": values})
    data = encode(Snapshot(attempt=attempt, seq=len(values), choices=[held]))
    return Gap(
        "t", EntryGap("start", f"{attempt}-{len(values)}", Stored(attempt, len(values), schema_text(), data)), None
    )


def _output(attempt: int, value: float) -> Output:
    delta = [Set(path=("s",), value=wire([value]))]
    decoded = DecodedOutput(attempt=attempt, seq=1, index=0, token_ids=[1], text=f"text {attempt}", deltas=[delta])
    return msgspec.msgpack.decode(encode(decoded), type=Output)


@pytest.mark.parametrize(
    ("events", "alarms"),
    [
        # More values had been read of the old attempt than the new one has.
        ([_gap(1, [5.0, 0.0, 0.0]), _gap(2, [7.0])], [(1, 0, 5.0), (2, 0, 7.0)]),
        # The rule sleeps after an alarm of the old attempt.
        ([_gap(1, [0.0, 5.0]), _gap(2, [7.0, 8.0, 9.0])], [(1, 1, 5.0), (2, 0, 7.0)]),
        ([_gap(1, [0.0, 5.0]), _gap(1, [0.0, 5.0, 0.0, 6.0])], [(1, 1, 5.0), (1, 3, 6.0)]),
        # What the guard reads after lost events may be of another attempt, too.
        ([_gap(1, [0.0, 5.0]), _output(2, 7.0)], [(1, 1, 5.0), (2, 0, 7.0)]),
    ],
    ids=["fewer values", "asleep", "the same attempt", "an output"],
)
def test_a_gap_that_spans_a_restart_begins_anew(events: list[Any], alarms: list[tuple[int, int, float]]) -> None:
    guarding: Any = SimpleNamespace(rules=read_rules(rules(rule={"save": "s", "output": None, "above": 4.5})))
    acting: Any = None
    followed = FollowedTrace(guarding, Lifecycle(type="queued", trace_id="t", model="tiny"), acting, lambda: True)
    found = [alarm for event in events for _, alarm in followed._alarms(event)]
    assert [(alarm.attempt, alarm.token, alarm.value) for alarm in found] == alarms
    assert [alarm.text for alarm in found] == [f"text {attempt}" for attempt, *_ in alarms]


async def test_a_save_that_is_no_list_counts_with_its_last_token(client: Client, guarded: Guarded) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("abc", [Set(path=("s",), value=1.0)], [], [Set(path=("s",), value=9.0)])
        await stage.final()

    assert await _alarms(client, guarded, script) == [(1, 0, 2, 9.0)]


async def test_odd_values_are_passed_over(client: Client, guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("x", {"s": "five"})
        await stage.save("x", {"s": np.zeros(2, np.float32)})
        await stage.save("x", {"s": 5.0})
        await stage.final()

    assert await _alarms(client, guarded, script) == [(1, 0, 2, 5.0)]
    assert "expected a number, got str" in caplog.text
    assert "give output" in caplog.text
