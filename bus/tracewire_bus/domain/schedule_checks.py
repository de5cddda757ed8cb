"""Checks of what a submission plans by tokens: changes of live parameters, and tokens in place of sampled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tracewire_bus.wire.live_values import LiveError, LiveValue, unpack_live
from tracewire_bus.wire.messages import StopWhen, Submission

from .intervention_checks import live_name
from .limits import MAX_LIVE_VALUES, measure
from .value_checks import MAX_INDEX

__all__ = ["ScheduleError", "check_plan"]

#: How many changes a submission may plan.
MAX_CHANGES: Final = 10_000


class ScheduleError(ValueError):
    """A submission's plan cannot be carried out. `field` names the part at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def check_plan(submission: Submission, vocabulary: int = 0) -> None:
    """Check the scheduled changes and the forced tokens of a submission.

    Args:
        submission: as it was decoded.
        vocabulary: the model's number of tokens; 0 if unknown.

    Raises:
        ScheduleError: naming the field.
        LimitExceeded: values are too large.
    """
    for number, invoke in enumerate(submission.invokes):
        field = "forced_tokens" if len(submission.invokes) == 1 else f"forced_tokens[{number}]"
        _check_tokens(invoke.forced_tokens, field, vocabulary)
    if not submission.schedule:
        return
    if len(submission.schedule) > MAX_CHANGES:
        raise ScheduleError("schedule", f"expected at most {MAX_CHANGES} changes, got {len(submission.schedule)}")
    try:
        declared = unpack_live(submission.live)
    except LiveError as error:
        raise ScheduleError("live", error.message) from None
    stops = _thresholds(submission)
    for change in submission.schedule:
        field = f"schedule[{change.index}]"
        if not 0 <= change.index <= MAX_INDEX:
            raise ScheduleError("schedule", f"expected the index of a token from 0 on, got {change.index}")
        measure(change.values, field, MAX_LIVE_VALUES)
        try:
            values = unpack_live(change.values)
        except LiveError as error:
            raise ScheduleError(f"{field}.{error.name}", error.message) from None
        _check_values(values, declared, field, stops)
        if change.invoke is not None and not 0 <= change.invoke < len(submission.invokes):
            raise ScheduleError(f"{field}.invoke", f"expected one of {len(submission.invokes)} prompts")


def _check_tokens(tokens: Sequence[Any], field: str, vocabulary: int) -> None:
    for place, token in enumerate(tokens):
        if type(token) is not int or token < 0 or (vocabulary and token >= vocabulary):
            most = f" below {vocabulary}" if vocabulary else ""
            raise ScheduleError(f"{field}[{place}]", f"expected a token id{most}, got {token!r}"[:200])


def _check_values(
    values: Mapping[str, LiveValue], declared: Mapping[str, LiveValue], field: str, stops: Mapping[str, str]
) -> None:
    if not values:
        raise ScheduleError(field, "expected at least one live parameter, got none")
    for name, value in values.items():
        if name not in declared:
            names = ", ".join(declared) or "none"
            raise ScheduleError(f"{field}.{name}", f"no such live parameter is declared (declared: {names})")
        if value.form != declared[name].form:
            raise ScheduleError(f"{field}.{name}", f"it was declared as {declared[name].form}, got {value.form}")
        if name in stops:
            why = "a threshold of StopWhen follows steering, and no schedule"
            raise ScheduleError(f"{field}.{name}", f"expected another live parameter: {why} ({stops[name]})")


def _thresholds(submission: Submission) -> dict[str, str]:
    """The live parameters that are thresholds of stop conditions, each with its probe."""
    found = {}
    for one in submission.interventions:
        if isinstance(one, StopWhen):
            for value in (one.above, one.below):
                if (name := live_name(value)) is not None:
                    found[name] = one.probe
    return found
