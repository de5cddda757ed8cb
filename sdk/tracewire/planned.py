"""What a submission plans by tokens: changes of live parameters, and tokens in place of sampled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracewire_bus.wire.messages import Invoke, ScheduledChange, Submission

from .checks import shown
from .errors import TraceRejected

__all__ = ["check_planned", "planned_tokens", "scheduled_changes"]


def scheduled_changes(schedule: Any) -> list[ScheduledChange]:
    """The changes of `schedule=`, in the order of their tokens.

    Raises:
        TraceRejected: it is no dict of dicts by tokens, or a value is no live parameter.
    """
    from tracewire_bus.wire.live_values import LiveError, live_values, pack_live

    if schedule is None:
        return []
    if not isinstance(schedule, Mapping):
        raise TraceRejected("schedule", f"expected a dict of changes by the index of a token, got {shown(schedule)}")
    found = []
    for index, values in schedule.items():
        if type(index) is not int or index < 0:
            raise TraceRejected("schedule", f"expected the index of a sampled token, got {shown(index)}")
        if not isinstance(values, Mapping):
            raise TraceRejected(f"schedule[{index}]", f"expected a dict of live parameters, got {shown(values)}")
        try:
            packed = pack_live({name: value.packed for name, value in live_values(values).items()})
        except LiveError as error:
            field = f"schedule[{index}].{error.name}" if error.name else f"schedule[{index}]"
            raise TraceRejected(field, error.message) from None
        found.append(ScheduledChange(index=index, values=packed))
    return sorted(found, key=lambda change: change.index)


def planned_tokens(invokes: Sequence[Invoke], forced: Any) -> None:
    """Give the prompts the tokens of `forced_tokens=`.

    Raises:
        TraceRejected: it is no list of token ids, or with several prompts no such list for each.
    """
    if forced is None:
        return
    lists = [forced] if len(invokes) == 1 else forced
    if isinstance(lists, str | bytes | Mapping) or not isinstance(lists, Sequence) or len(lists) != len(invokes):
        what = "a list of token ids" if len(invokes) == 1 else f"{len(invokes)} lists of token ids, one a prompt"
        raise TraceRejected("forced_tokens", f"expected {what}, got {shown(forced)}")
    for number, (invoke, tokens) in enumerate(zip(invokes, lists, strict=True)):
        field = "forced_tokens" if len(invokes) == 1 else f"forced_tokens[{number}]"
        values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise TraceRejected(field, f"expected a list of token ids, got {shown(tokens)}")
        invoke.forced_tokens = list(values)


def check_planned(submission: Submission) -> None:
    """Check what a submission plans, as an engine does.

    Raises:
        TraceRejected: naming the field.
    """
    if not submission.schedule and not any(invoke.forced_tokens for invoke in submission.invokes):
        return
    from tracewire_bus.domain.schedule_checks import ScheduleError, check_plan

    try:
        check_plan(submission)
    except ScheduleError as error:
        raise TraceRejected(error.field, error.message) from None
