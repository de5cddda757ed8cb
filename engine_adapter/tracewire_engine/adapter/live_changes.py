"""Takes changes of live parameters from the bus to the workers, and publishes them on their trace's stream.

A `LiveTrace` holds the changes of one run that were accepted and are not published yet. The adapter sends the workers
the changes of all runs in one call, and makes one such call at a time, so changes that come faster than steps share a
call. The workers report the first step of each version before anything else of that step. The trace's next event is
then a `Steered`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec

from tracewire_bus.domain.intervention_checks import substitute_live
from tracewire_bus.domain.limits import MAX_LIVE_VALUES, measure
from tracewire_bus.transport.backoff import Backoff
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.transport.guard import integer
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.live_values import live_values, unpack_live
from tracewire_bus.wire.messages import FirstToken, RawSteered, StopWhen
from tracewire_bus.wire.packing import decoder, unpack
from tracewire_engine.protocol.messages import Applied

from .engine_api import Engine

__all__ = ["LiveTrace", "Steering", "take_last_changes"]

logger = logging.getLogger("tracewire")


class _Change(msgspec.Struct, array_like=True):
    """A `Change` whose values stay packed."""

    version: int
    by: str
    time: int
    values: dict[str, msgspec.Raw]


_change = decoder(_Change, plain=True)
_fields = decoder(list[msgspec.Raw], plain=True)
_encode = msgspec.msgpack.Encoder().encode

#: How many of its changes a run knows again.
_KNOWN: Final = 4096


def _read(data: bytes, forms: Mapping[str, str]) -> _Change:
    """Decode a change, and check it against the declared live parameters.

    A change that does not fit would fail in the workers, together with the changes of all other traces in the call.

    Raises:
        ValueError: it cannot be decoded, or does not fit.
    """
    # A value may be small and decode to many objects, while all traces wait.
    measure(data, "live", MAX_LIVE_VALUES)
    change: _Change = _change(data)
    integer(change.version)
    for name, value in live_values({name: unpack(bytes(raw)) for name, raw in change.values.items()}).items():
        if forms.get(name) != value.form:
            raise ValueError(f"live parameter {name!r} is {forms.get(name, 'not declared')}, got {value.form}")
    return change


def _renumbered(data: bytes, version: int) -> bytes:
    """An encoded change under another version. Its signature covers no version."""
    return _encode([version, *_fields(data)[1:]])


def _ignore(applied: Applied) -> None:
    """Do nothing with a report."""


class LiveTrace:
    """The live parameters of one run, which begin as `packed`, at `version`.

    `changes` are those that `packed` already contains and that no event has published yet.
    """

    def __init__(
        self, run: str, packed: bytes, version: int, changes: Sequence[bytes], stops: Sequence[StopWhen]
    ) -> None:
        self.run = run
        self.first_version = self.version = version
        self._forms = {name: value.form for name, value in unpack_live(packed).items()}
        #: Changes that were accepted and no event has published yet: version and encoded change, in order.
        self._unpublished: list[tuple[int, bytes]] = []
        #: The last changes that the run has, by a hash of what Redis keeps: their versions there.
        self._known: dict[int, int] = {}
        #: The last version of a change that the run knows no longer.
        self._forgotten = 0
        #: Whether the run has given a change another version than Redis, and the trace's record has to be told.
        self.renumbered = False
        for data in changes:
            try:
                self._unpublished.append((_read(data, self._forms).version, data))
                self._know(self._unpublished[-1][0], data)
            except ValueError as error:
                logger.warning("a change of live parameters of run %s could not be read: %s", run, error)
        self._values: dict[str, Any] = unpack(packed)
        #: The packed values that have changed since, by name.
        self.changed: dict[str, bytes] = {}
        self._stops = list(stops)
        #: The last version that the workers were sent, and the last that they reported.
        self.sent = self.applied = version
        #: Values that a failed call did not bring to the workers. The next change takes them along.
        self.undelivered: dict[str, msgspec.Raw] = {}
        #: Whether any change was sent to the workers.
        self.steered = False
        #: Changes to publish before the next event, as the fields of a `Steered`.
        self._notes: list[tuple[int, list[tuple[str, int, int]]]] = []
        #: Wakes the tasks that wait for the workers.
        self.on_applied: Callable[[Applied], None] = _ignore

    def take(self, data: bytes, *, kept: bool = False) -> dict[str, msgspec.Raw]:
        """Take an accepted change. Returns the values to send to the workers, none if the change is known already.

        A Redis that has lost changes gives their versions to others. A change that is new although its version is not
        gets the next version.

        Args:
            data: the encoded change.
            kept: whether it comes from the record, which may still have changes that events of an earlier attempt have
                published.

        Raises:
            ValueError: the change cannot be decoded, or does not fit the declared live parameters.
        """
        change = _read(data, self._forms)
        if hash(data) in self._known:
            return {}
        version = change.version
        if version <= self.version:
            if version <= self._forgotten or (kept and version <= self.first_version):
                return {}
            version = self.version + 1
            self.renumbered = True
        self._know(change.version, data)
        self.version = version
        self.changed.update({name: bytes(packed) for name, packed in change.values.items()})
        self._unpublished.append((version, data if version == change.version else _renumbered(data, version)))
        return change.values

    def _know(self, version: int, data: bytes) -> None:
        self._known[hash(data)] = version
        if len(self._known) > _KNOWN:
            self._forgotten = max(self._forgotten, self._known.pop(next(iter(self._known))))

    @property
    def told_version(self) -> int:
        """The version up to which the stream has reported all changes."""
        return self._unpublished[0][0] - 1 if self._unpublished else self.version

    @property
    def outstanding(self) -> bool:
        """Whether the workers were sent a change whose first step they have not reported."""
        return self.sent > self.applied

    def stops_at(self, version: int) -> list[StopWhen]:
        """The stop conditions, with the values that hold at `version`. Called with each version, in order."""
        if not self._stops:
            return []
        for number, data in self._unpublished:
            if number <= version:
                self._values.update({name: unpack(bytes(packed)) for name, packed in _change(data).values.items()})
        return [one for stop in self._stops if isinstance(one := substitute_live(stop, self._values), StopWhen)]

    def report(self, applied: Applied) -> None:
        """Take the workers' report that a step with a new version begins."""
        if applied.version <= self.applied:
            return
        self.applied = applied.version
        self.on_applied(applied)
        self._notes.append((applied.version, applied.first))

    def take_events(self, places: Callable[[list[tuple[str, int, int]]], list[FirstToken]]) -> list[RawSteered]:
        """The changes that the stream reports now, in order. `places` turns requests into invokes."""
        notes, self._notes = self._notes, []
        return [self._steered(version, places(first)) for version, first in notes]

    def first_events(self, first: list[FirstToken]) -> list[RawSteered]:
        """The changes that were accepted before the run began. They are in effect from the tokens `first` on."""
        early = any(number <= self.first_version for number, _ in self._unpublished)
        return [self._steered(self.first_version, first)] if early else []

    def last_events(self) -> list[RawSteered]:
        """The changes that were accepted and reached no step. The final reports them."""
        return [self._steered(self.version, [])] if self._unpublished else []

    def _steered(self, version: int, first: list[FirstToken]) -> RawSteered:
        changes = [msgspec.Raw(data) for number, data in self._unpublished if number <= version]
        self._unpublished = [(number, data) for number, data in self._unpublished if number > version]
        return RawSteered(attempt=0, seq=0, version=version, first=first, time=time.time(), changes=changes)


async def take_last_changes(live: LiveTrace, trace: str, close: Callable[[], Awaitable[list[bytes]]]) -> None:
    """Close the record of a trace to changes, and take those that it has accepted.

    Args:
        live: takes the changes.
        trace: its id.
        close: closes the record, and returns all changes that it has accepted.
    """
    backoff = Backoff()
    try:
        while True:
            try:
                changes = await close()
                break
            except BusUnavailable as problem:
                # The final would have to wait for Redis too. Changes that Redis accepts until then belong to the trace.
                logger.log(backoff.level, "trace %s waits for Redis to end: %s", trace, problem)
                await anyio.sleep(backoff.next())
    except BusError as problem:
        logger.warning("trace %s ends, but its last changes could not be read from its record: %s", trace, problem)
        return
    for change in changes:
        try:
            live.take(change, kept=True)
        except (ValueError, msgspec.MsgspecError):
            logger.exception("a change of live parameters of trace %s could not be read", trace)


class Steering:
    """Sends changes to the workers, those of all runs in one call, and one call at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[str, tuple[LiveTrace, dict[str, msgspec.Raw]]] = {}
        self._over: list[str] = []
        #: When the first of the waiting changes was read, in seconds since the epoch.
        self._since = 0.0
        self._wanted = Signal()
        self._calling = False

    @property
    def busy(self) -> bool:
        """Whether changes or ends of runs are still to be sent to the workers."""
        return bool(self._calling or self._waiting or self._over)

    def send(self, live: LiveTrace, values: dict[str, msgspec.Raw]) -> None:
        """Send changed values of a run to the workers, with the next call."""
        if not values:
            return
        if not self._waiting:
            self._since = time.time()
        before = self._waiting.get(live.run)
        earlier = before[1] if before else live.undelivered
        self._waiting[live.run] = live, {**earlier, **values}
        live.undelivered = {}
        live.sent, live.steered = live.version, True
        self._wanted.notify()

    def over(self, live: LiveTrace) -> None:
        """Note that a run is over, and let the workers forget its values."""
        # Break the reference cycle, so that the run is freed now and not by a later garbage collection.
        live.on_applied = _ignore
        self._waiting.pop(live.run, None)
        if live.steered:
            self._over.append(live.run)
            self._wanted.notify()

    async def run(self) -> None:
        """Send changes to the workers as they come. Never ends by itself."""
        backoff = Backoff()
        while True:
            while not self._waiting and not self._over:
                await self._wanted.wait()
            waiting, self._waiting = self._waiting, {}
            over, self._over = self._over, []
            changes = {run: (live.sent, values) for run, (live, values) in waiting.items()}
            self._calling = True
            try:
                await self._engine.steer(changes, over, self._since)
                backoff.reset()
            except Exception:
                if self._engine.lost:
                    # The runs of that engine learn of its loss by themselves.
                    await anyio.sleep_forever()
                logger.exception("changes of %d traces did not reach the workers", len(changes))
                for run, (live, values) in waiting.items():
                    if run in self._waiting:
                        self._waiting[run] = live, {**values, **self._waiting[run][1]}
                    else:
                        # Report the version as applied, so that no task waits for it.
                        live.undelivered = values
                        live.report(Applied(run, changes[run][0]))
                self._over = [*over, *self._over]
                await anyio.sleep(backoff.next())
            finally:
                self._calling = False
