"""What a guard does about an alarm: within its budget it pauses the trace, has somebody decide, and does that."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import anyio

from tracewire.error_mapping import bus_errors
from tracewire.errors import BusUnavailable, NotFoundError, TraceEnded, TracewireError

from .alarm import Alarm, Decision
from .audit import AuditLine, GuardAudit
from .budget import Actions
from .rules import Rule, Rules

if TYPE_CHECKING:
    from tracewire.client import Client
    from tracewire_bus.store.guard_marks import GuardMarks

__all__ = ["Acting", "Guarding", "patiently"]

logger = logging.getLogger("tracewire")

T = TypeVar("T")

#: How long after a rule's `timeout` the engine ends a pause that the guard has not ended, in seconds.
_GRACE_S = 5.0


@dataclass(frozen=True)
class Guarding:
    """What makes a guard: its client, its rules, its name, who decides, and who sees the decisions."""

    client: Client
    rules: Rules
    name: str
    decide: Callable[[Alarm], Awaitable[Decision]]
    decided: Callable[[AuditLine], Awaitable[None]]
    #: Whether a subclass decides in place of those whom the rules name.
    overridden: bool = False


class Acting:
    """Handles the alarms of one guard, and counts them."""

    def __init__(self, guard: Guarding, marks: GuardMarks, audit: GuardAudit) -> None:
        self.handled = 0
        self._guard = guard
        self._marks = marks
        self._audit = audit
        self._actions = Actions(guard.rules.budget)

    def forget(self, trace_id: str) -> None:
        """Forget a trace that has ended."""
        self._actions.forget(trace_id)

    async def decided_marks(self, trace_id: str) -> set[str]:
        """The alarms of a trace that guards of this group have decided.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        with bus_errors():
            return await self._marks.read(trace_id, self._guard.rules.group)

    async def handle(self, rule: Rule, alarm: Alarm) -> None:
        """Handle an alarm to its end. Errors go to the audit; while Redis does not answer, the guard waits."""
        began = anyio.current_time()
        rules = self._guard.rules
        line = AuditLine(time=0.0, group=rules.group, guard=self._guard.name, alarm=alarm, outcome="done")
        line.asked = "decide" if self._guard.overridden else _asked(rule)
        if rules.dry_run:
            line.outcome, line.do = "dry run", rule.do or ""
        else:
            try:
                await self._act(rule, alarm, line)
            except (TraceEnded, NotFoundError) as error:
                line.outcome, line.reason = "late", line.reason or str(error)
            except TracewireError as error:
                line.outcome, line.reason = "failed", str(error)
                logger.warning("guard: trace %s, rule %s: %s", alarm.trace_id, rule.name, error)
            done = f"{line.outcome} {line.do}".strip()
            await patiently(lambda: self._mark(alarm, done))
        line.time, line.seconds = time.time(), anyio.current_time() - began
        await self._audit.write(line)
        self.handled += 1
        await self._guard.decided(line)

    async def _mark(self, alarm: Alarm, done: str) -> None:
        with bus_errors():
            await self._marks.add(alarm.trace_id, self._guard.rules.group, alarm.mark, done)

    async def _act(self, rule: Rule, alarm: Alarm, line: AuditLine) -> None:
        limit = self._actions.take(alarm.trace_id, anyio.current_time())
        author = self._author(rule)
        if limit:
            line.outcome, line.reason = "over budget", f"beyond {limit}"
            await self._beyond(rule, alarm, line, author)
            return
        if rule.pause and rule.do != "cancel":
            line.paused = await self._pause(rule, alarm, line, author)
        decision = await self._decision(rule, alarm, line)
        try:
            await self._carry_out(decision, alarm, line, author)
        except (TraceEnded, NotFoundError):
            raise
        except TracewireError as error:
            # Such as a live parameter that the trace has not declared: the rule says what is done instead.
            await self._carry_out(Decision(rule.on_timeout), alarm, line, author)
            line.outcome, line.reason = "failed", f"{decision.do}: {error}"
        finally:
            if line.paused and line.do != "cancel":
                await patiently(lambda: self._guard.client.resume(alarm.trace_id, by=author, paused_by=author))

    def _author(self, rule: Rule) -> str:
        return f"guard:{self._guard.rules.group}/{rule.name}"

    async def _pause(self, rule: Rule, alarm: Alarm, line: AuditLine, author: str) -> bool:
        """Pause the trace. Returns `False` if another client has paused it, whose pause stays."""
        timeout = rule.timeout + _GRACE_S
        paused = await patiently(
            lambda: self._guard.client.pause(alarm.trace_id, by=author, timeout=timeout, on_timeout=rule.on_timeout)
        )
        if paused and alarm.time:
            line.pause_seconds = time.time() - alarm.time
        return paused

    async def _decision(self, rule: Rule, alarm: Alarm, line: AuditLine) -> Decision:
        try:
            with anyio.fail_after(rule.timeout):
                return await self._guard.decide(alarm)
        except TimeoutError:
            line.outcome = "no answer"
            return Decision(rule.on_timeout, reason=f"no answer within {rule.timeout:g} s")
        except Exception as error:
            # Whatever the one who was asked has raised, the trace must not stay paused.
            logger.warning("guard: rule %s got no decision about trace %s: %r", rule.name, alarm.trace_id, error)
            line.outcome = "no answer"
            return Decision(rule.on_timeout, reason=f"no decision: {type(error).__name__}: {error}"[:300])

    async def _carry_out(self, decision: Decision, alarm: Alarm, line: AuditLine, author: str) -> None:
        client, trace = self._guard.client, alarm.trace_id
        line.do, line.live, line.reason = decision.do, dict(decision.live), decision.reason
        if decision.do == "steer":
            await patiently(lambda: client.steer(trace, decision.live, by=author))
        elif decision.do == "cancel":
            reason = decision.reason or f"{alarm.rule}: {alarm.save} is {alarm.value:g} at token {alarm.token}"
            if not await patiently(lambda: client.cancel(trace, reason, by=author)):
                raise TraceEnded(trace)

    async def _beyond(self, rule: Rule, alarm: Alarm, line: AuditLine, author: str) -> None:
        beyond = self._guard.rules.budget.beyond
        if beyond == "cancel":
            decision = Decision("cancel", reason=f"{rule.name}: beyond the guard's budget")
            await self._carry_out(decision, alarm, line, author)
        elif beyond == "pause":
            line.paused = await self._pause(rule, alarm, line, author)
            line.do = rule.on_timeout


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call until Redis answers."""
    while True:
        try:
            return await call()
        except BusUnavailable as error:
            logger.warning("guard: waits for Redis: %s", error)
            await anyio.sleep(error.retry_after)


def _asked(rule: Rule) -> str:
    if rule.ask is None or isinstance(rule.ask, str):
        return rule.ask or "nobody"
    return next(name for name in ("http", "function", "model") if getattr(rule.ask, name))
