"""What a submission plans by tokens is checked against its live parameters and its model."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_bus.domain import schedule_checks
from tracewire_bus.domain.schedule_checks import ScheduleError, check_plan
from tracewire_bus.wire.messages import Invoke, Live, Probe, ScheduledChange, StopWhen, Submission
from tracewire_bus.wire.packing import pack


def submission(*changes: ScheduledChange, forced: Any = (), **more: Any) -> Submission:
    invoke = Invoke(prompt="p", forced_tokens=list(forced))
    return Submission(
        trace="t", model="m", invokes=[invoke], live=pack({"alpha": 0.0, "mode": "a"}), schedule=[*changes], **more
    )


def change(values: Any = None, index: int = 3, **more: Any) -> ScheduledChange:
    return ScheduledChange(index=index, values=pack({"alpha": 1.0} if values is None else values), **more)


def test_what_fits_is_let_through() -> None:
    check_plan(submission(change(), change({"mode": "b"}, invoke=0, choice=5), forced=[0, 99]), vocabulary=100)
    check_plan(submission())


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ([change(index=-1)], "schedule", "from 0 on, got -1"),
        ([change(index=2**31)], "schedule", "from 0 on"),
        ([change({})], "schedule[3]", "at least one"),
        ([change({"beta": 1.0})], "schedule[3].beta", "declared: alpha, mode"),
        ([change({"alpha": "x"})], "schedule[3].alpha", "declared as"),
        ([change({"alpha": float("nan")})], "schedule[3].alpha", "finite"),
        ([change(invoke=1)], "schedule[3].invoke", "expected one of 1 prompts"),
    ],
)
def test_what_does_not_fit_is_named(changes: list[ScheduledChange], field: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said) as caught:
        check_plan(submission(*changes))
    assert caught.value.field == field


def test_a_threshold_follows_no_schedule() -> None:
    stop = StopWhen(probe="p", above=Live(live="alpha"))
    with pytest.raises(ScheduleError, match="a threshold of StopWhen") as caught:
        check_plan(submission(change(), interventions=[Probe(name="p", at="residual(0)"), stop]))
    assert caught.value.field == "schedule[3].alpha"


@pytest.mark.parametrize("tokens", [[-1], [100], ["x"], [True], [1, 1.0]])
def test_a_forced_token_is_one_of_the_model(tokens: Any) -> None:
    with pytest.raises(ScheduleError, match="expected a token id below 100") as caught:
        check_plan(submission(forced=tokens), vocabulary=100)
    assert caught.value.field == f"forced_tokens[{len(tokens) - 1}]"


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_checks, "MAX_CHANGES", 2)
    with pytest.raises(ScheduleError, match="at most 2 changes, got 3"):
        check_plan(submission(change(), change(), change()))
