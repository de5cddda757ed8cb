"""How a guard reads one trace: the values of its rules' saves, token by token, and the alarms that they set off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio

from tracewire.errors import BusUnavailable, ClientClosed, EventsLost, TracewireError
from tracewire.traces.output import Gap, Output, Restarted
from tracewire_bus.wire.kinds import is_array

from .alarm import Alarm
from .rules import Rule
from .trigger import Trigger

if TYPE_CHECKING:
    from tracewire.traces.output import Event
    from tracewire_bus.store.lifecycle import Lifecycle

    from .acting import Acting, Guarding

__all__ = ["FollowedTrace", "number_of"]

logger = logging.getLogger("tracewire")

#: How much of the end of a choice's text an alarm has, in characters.
_TEXT = 2000


class FollowedTrace:
    """A trace that a guard follows. `is_mine` says whether no other guard has taken it over."""

    def __init__(self, guard: Guarding, event: Lifecycle, acting: Acting, is_mine: Callable[[], bool]) -> None:
        self.is_mine = is_mine
        self._guard = guard
        self._acting = acting
        self._trace_id, self._model = event.trace_id, event.model
        self._attempt = 1
        self._texts: dict[tuple[int, int], str] = {}
        self._triggers: dict[tuple[str, int, int], Trigger] = {}
        #: For each choice and save, how many items were read.
        self._read: dict[tuple[int, int, str], int] = {}
        self._odd: set[str] = set()

    async def run(self) -> bool:
        """Read to the end. Returns `False` if another guard has taken the trace over."""
        since = "start"
        while True:
            try:
                return await self._read_from(since)
            except EventsLost as error:
                logger.warning("guard: trace %s: %s", self._trace_id, error)
                since = error.until
            except BusUnavailable as error:
                # Read again from the beginning: the marks tell what was decided.
                logger.warning("guard: trace %s waits for Redis: %s", self._trace_id, error)
                await anyio.sleep(error.retry_after)
                since = "start"
                self._restart(1)
            except ClientClosed:
                raise
            except TracewireError as error:
                # It has expired, or this guard may not read it: no guard of the group can.
                logger.warning("guard: trace %s is not guarded: %s", self._trace_id, error)
                return True

    async def _read_from(self, since: str) -> bool:
        decided = await self._acting.decided_marks(self._trace_id)
        names = {rule.save for rule in self._guard.rules.rules}
        async with self._guard.client.subscribe(self._trace_id, since=since, names=names) as events:
            async for event in events:
                for rule, alarm in self._alarms(event):
                    if alarm.mark in decided:
                        continue
                    if not self.is_mine():
                        return False
                    await self._acting.handle(rule, alarm)
        return True

    def _restart(self, attempt: int) -> None:
        self._attempt = attempt
        self._texts.clear()
        self._triggers.clear()
        self._read.clear()

    def _reach(self, attempt: int) -> None:
        """Begin anew if an event is of another attempt: the event that told of the restart may have been trimmed."""
        if attempt != self._attempt:
            self._restart(attempt)

    def _alarms(self, event: Event) -> Iterator[tuple[Rule, Alarm]]:
        """The alarms that an event sets off, in the order of tokens."""
        match event:
            case Restarted():
                self._restart(event.attempt)
            case Output():
                self._reach(event.attempt)
                where = event.invoke, event.choice
                self._texts[where] = (self._texts.get(where, "") + event.text)[-_TEXT:]
                yield from self._of_output(event)
            case Gap():
                # The whole state so far: the values that were not read yet come at its end.
                self._reach(int(event.until.partition("-")[0]))
                for choice in (one for invoke in event.state.invokes for one in invoke.choices):
                    where = choice.invoke, choice.choice
                    self._texts[where] = choice.text[-_TEXT:]
                    last = max(0, len(choice.token_ids) - 1)
                    for rule in self._guard.rules.rules:
                        found = choice.saves.get(rule.save)
                        items = found if isinstance(found, list) else [] if found is None else [found]
                        fresh = items[self._read.get((*where, rule.save), 0) :]
                        first = len(items) - len(fresh) if len(items) > 1 else last
                        yield from self._feed(rule, where, first, fresh, event_time=0.0)
                    for name, value in choice.saves.items():
                        self._read[*where, str(name)] = len(value) if isinstance(value, list) else 0

    def _of_output(self, event: Output) -> Iterator[tuple[Rule, Alarm]]:
        where = event.invoke, event.choice
        try:
            delta = event.delta
        except TracewireError as error:
            self._note_odd(f"the saves of event {event.id} cannot be read: {error}")
            return
        found = []
        for rule in self._guard.rules.rules:
            if rule.save in delta:
                value = delta[rule.save]
                items = value if isinstance(value, list) else [value]
                # With fewer items than tokens, the last items belong to the last tokens.
                first = event.index + max(0, len(event.token_ids) - len(items))
                found += list(self._feed(rule, where, first, items, event_time=event.time))
        for name in {rule.save for rule in self._guard.rules.rules} & delta.keys():
            value, key = delta[name], (*where, name)
            self._read[key] = self._read.get(key, 0) + (len(value) if isinstance(value, list) else 0)
        yield from sorted(found, key=lambda one: one[1].token)

    def _feed(
        self, rule: Rule, where: tuple[int, int], first: int, items: list[Any], *, event_time: float
    ) -> Iterator[tuple[Rule, Alarm]]:
        """The alarms of one rule at new items of a choice, which belong to the tokens from `first` on."""
        trigger = self._triggers.get((rule.name, *where))
        if trigger is None:
            trigger = self._triggers[rule.name, *where] = Trigger(rule)
        for token, item in enumerate(items, first):
            try:
                value = number_of(item, rule.output)
            except ValueError as error:
                self._note_odd(f"rule {rule.name!r}, save {rule.save!r}: {error}")
                continue
            if trigger.feed(value):
                yield (
                    rule,
                    Alarm(
                        trace_id=self._trace_id,
                        model=self._model,
                        rule=rule.name,
                        save=rule.save,
                        invoke=where[0],
                        choice=where[1],
                        attempt=self._attempt,
                        token=token,
                        value=value,
                        text=self._texts.get(where, ""),
                        time=event_time,
                    ),
                )

    def _note_odd(self, text: str) -> None:
        """Log, once for each text, why a value was not read."""
        if text not in self._odd and len(self._odd) < 16:
            self._odd.add(text)
            logger.warning("guard: trace %s is not guarded there: %s", self._trace_id, text)


def number_of(item: Any, output: int | None) -> float:
    """The number in an item of a save; with `output`, the one of that index.

    Raises:
        ValueError: there is no such number, or there are several and `output` is None.
    """
    import numpy as np

    if is_array(item) or isinstance(item, bool | int | float) or (isinstance(item, list) and item):
        array = np.asarray(item)
    else:
        raise ValueError(f"expected a number, got {type(item).__name__}")
    if array.dtype.kind in "OUS":
        raise ValueError("expected numbers, got other values")
    flat = array.reshape(-1)
    if output is None and flat.size != 1:
        raise ValueError(f"expected one number, got {flat.size}: give output, the index of the one to read")
    index = output or 0
    if index >= flat.size:
        raise ValueError(f"expected at least {index + 1} numbers (output = {index}), got {flat.size}")
    return float(flat[index])
