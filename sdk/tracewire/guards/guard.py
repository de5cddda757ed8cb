"""A guard: an ordinary consumer of all traces of a model, which acts where a probe says so.

Several guards of one group share the traces. Each trace that is queued goes to one of them, which keeps the event until
it has read the trace's end. So a guard that dies leaves its traces to the others, or to itself when it starts again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import anyio

from tracewire.checks import check_text
from tracewire.error_mapping import bus_errors, connect_error
from tracewire_bus.bus import BusError
from tracewire_bus.store.guard_marks import GuardMarks
from tracewire_bus.transport.errors import first_error

from .acting import Acting, Guarding, patiently
from .alarm import Alarm, Decision
from .asking import Asker, Terminal, asker, check_function
from .audit import AuditLine, GuardAudit, check_audit
from .following import FollowedTrace
from .rules import Rules, read_rules

if TYPE_CHECKING:
    from tracewire.client import Client
    from tracewire_bus.store.lifecycle import Lifecycle

__all__ = ["Guard", "check_surroundings"]

logger = logging.getLogger("tracewire")


def check_surroundings(rules: Rules) -> None:
    """Check what rules need of the machine: the functions that they ask, and the audit's file.

    Raises:
        InvalidRules: it has not all of it. The error names the rule and the field.
    """
    for rule in rules.rules:
        check_function(rule)
    check_audit(rules.audit)


class Guard:
    """Watches saves of all traces of a model, and pauses, steers, resumes or cancels traces as its rules say.

        async with tracewire.connect(url) as client:
            await tracewire.Guard(client, "rules.toml").run()

    `rules` is the path of a TOML file, or a dict of the same form (`docs/guards.md`). `name` is the guard's name in its
    group, by default the client's: names within a group differ. A guard that is killed and starts again under its name
    takes up its traces at once; other guards of its group do so after the rules' `idle` seconds.

    A subclass overrides `decide` to ask somebody else than its rules say, `decided` to see each decision, and `joined`
    to learn when the guard has begun.

    Raises:
        InvalidRules: a rule is wrong, its function cannot be imported, or the audit's file cannot be written. The error
            names the rule and the field.
    """

    def __init__(
        self,
        client: Client,
        rules: str | PathLike[str] | Mapping[str, Any] | Rules,
        *,
        name: str | None = None,
    ) -> None:
        self.client = client
        self.rules = read_rules(rules)
        check_surroundings(self.rules)
        session = client._session
        self.name = session.name if name is None else check_text("name", name)
        if not self.name:
            raise ValueError("name: expected a name, got an empty one")
        terminal = Terminal()
        self._askers: dict[str, Asker] = {rule.name: asker(rule, client, terminal) for rule in self.rules.rules}
        self._bus = session.open_bus()
        self._marks = GuardMarks(self._bus)
        #: The traces that the guard follows, with the place of each in the group's events.
        self._followed: dict[str, Any] = {}

    # --- for subclasses -----------------------------------------------------------------------------------------------

    async def decide(self, alarm: Alarm) -> Decision:
        """What is to be done about an alarm: asks whom its rule names. It may take the rule's `timeout`.

        If the call raises an error, or takes longer, the trace is resumed or cancelled as the rule's `on_timeout` says.
        """
        return await self._askers[alarm.rule](alarm)

    async def decided(self, line: AuditLine) -> None:
        """Called with each decision, once it was done and written to the audit."""

    async def joined(self) -> None:
        """Called when the guard has joined its group: traces that are queued from now on go to the group."""

    # --- running ------------------------------------------------------------------------------------------------------

    @property
    def following(self) -> int:
        """How many traces the guard follows now."""
        return len(self._followed)

    async def run(self) -> None:
        """Guard until the caller cancels it. Waits while Redis does not answer.

        Leaving passes the traces that still run to the other guards of the group.

        Raises:
            BusRefused: Redis does not allow what a guard needs (`tracewire acl guard`).
            UnknownWatchGroup: the group was removed.
            ClientClosed: the client was closed.
            InvalidRules: the audit's file cannot be opened.
        """
        rules = self.rules
        overridden = type(self).decide is not Guard.decide
        guarding = Guarding(self.client, rules, self.name, self.decide, self.decided, overridden)
        watch = self._bus.watch_group(rules.group, self.name, rules.since, rules.idle)
        audit = GuardAudit(rules.audit, self._bus)
        acting = Acting(guarding, self._marks, audit)

        async def acknowledge(place: Any) -> None:
            with bus_errors():
                await watch.acknowledge(place)

        async def follow(event: Lifecycle, place: Any) -> None:
            """Read a trace to its end, and act on its alarms."""
            followed = FollowedTrace(guarding, event, acting, lambda: watch.is_kept(place))
            try:
                if await followed.run():
                    await patiently(lambda: acknowledge(place))
            finally:
                del self._followed[event.trace_id]
                acting.forget(event.trace_id)

        try:
            async with watch, anyio.create_task_group() as following:
                await self.joined()
                async for event in watch:
                    # An event comes again where this guard hung for long; it goes on with the trace then.
                    if event.type == "queued" and event.model == rules.model:
                        place = watch.keep()
                        if event.trace_id not in self._followed:
                            self._followed[event.trace_id] = place
                            following.start_soon(follow, event, place)
        except (anyio.ClosedResourceError, BusError) as error:
            raise connect_error(error) from error
        except BaseExceptionGroup as errors:
            # The first of what ended the guard: the rest are its followers.
            raise _first(errors) from None
        finally:
            audit.close()

    def __repr__(self) -> str:
        return f"<Guard {self.name} of {self.rules.group}: {self.rules.model}, {self.following} traces>"


def _first(errors: BaseException) -> BaseException:
    error: BaseException = first_error(errors)
    if isinstance(error, anyio.ClosedResourceError | BusError):
        return connect_error(error)
    return error
