"""An alarm of a guard, and what was decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .rules import Do, Rule

__all__ = ["Alarm", "Decision", "decision_of"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A rule's alarm on one choice of a trace.

    Attributes:
        trace_id, model: the trace, and its model.
        rule: the name of the rule. `save`: the save that it reads.
        invoke, choice: which of the trace's prompts, and which of its sampled sequences; both from 0.
        attempt: the attempt of the trace, from 1.
        token: the index of the token at which the alarm went off.
        value: the value of the save there.
        text: the end of the choice's text up to that token's output.
        time: when the token was sampled, in seconds since the epoch by the engine's clock.
    """

    trace_id: str
    model: str
    rule: str
    save: str
    invoke: int = 0
    choice: int = 0
    attempt: int = 1
    token: int = 0
    value: float = 0.0
    text: str = ""
    time: float = 0.0

    @property
    def mark(self) -> str:
        """The alarm's name within its trace."""
        return f"{self.rule}/{self.attempt}/{self.invoke}.{self.choice}/{self.token}"


class Decision(msgspec.Struct, frozen=True):
    """What a guard does about an alarm. `live` are the live parameters that `"steer"` sets; `reason` is for people."""

    do: Do
    live: dict[str, Any] = {}
    reason: str = ""


def decision_of(answer: Any, rule: Rule) -> Decision:
    """The decision in an answer: a `Decision`, a dict of its fields, or a word. `steer` has the rule's `live`.

    Raises:
        ValueError: the answer is none of these.
    """
    if isinstance(answer, str):
        answer = {"do": answer.strip().lower()}
    if isinstance(answer, Mapping):
        try:
            answer = msgspec.convert(dict(answer), Decision)
        except msgspec.ValidationError as error:
            raise ValueError(f"expected a decision (do: 'steer', 'resume' or 'cancel'): {error}") from None
    if not isinstance(answer, Decision):
        raise ValueError(f"expected a decision: a Decision, a dict or a word, got {type(answer).__name__}")
    decision: Decision = answer
    if decision.do == "steer" and not decision.live:
        if not rule.live:
            raise ValueError("expected the live parameters that 'steer' sets: neither the answer nor the rule has any")
        decision = msgspec.structs.replace(decision, live=rule.live)
    return decision
