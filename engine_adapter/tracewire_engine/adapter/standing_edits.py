"""Standing interventions in the adapter: which are installed, which run on a request, and publishing their records.

The adapter reads all edits of its model when it starts and whenever they change, and checks each as it checks a
submission. A request gets the edits that are installed when the adapter takes it. Their encoded blocks travel to the
workers with the request, as its own block does. So nothing has to be broadcast, and a running request keeps its edits.

The adapter publishes an edit's errors, and its saves on requests that are not traces, on the edit's own stream.
Requests do not wait for that. While Redis does not answer, these records wait in memory, up to a limit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import msgspec

from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Key, SignatureRefused
from tracewire_bus.domain.intervention_checks import array_fields
from tracewire_bus.store.edits import RECORD_BYTES, EditSet, Installed, LastChange, selected
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.transport.tasks import Signal
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.messages import Block, Edit, EditRecord, EngineInfo, Hold, Patch, Reading, StopWhen
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.messages import EditBlock, FinishRecord, Placed

from .audit import Audit
from .digests import split_by_edit
from .engine_api import Rejection
from .gate import Gate
from .pending import PendingRecords
from .placing import Placer

__all__ = ["RequestEdits", "StandingEdits"]

logger = logging.getLogger("tracewire")

#: How often the adapter looks for changed edits without a notification, in milliseconds.
_LOOK_MS = 2000
#: How many bytes of records wait for Redis before the oldest are dropped.
_WAITING_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_NO_DELTAS = msgspec.Raw(_encoder.encode([]))
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])


class RunnableEdit(msgspec.Struct, frozen=True):
    """An edit that this engine can run."""

    name: str
    version: int
    scope: str
    fatal: bool
    max_failures: int
    block: EditBlock | None
    placed: list[msgspec.Raw]
    reads: bool


@dataclass
class _Streak:
    """The requests in a row on which an edit raised.

    Attributes:
        tenants: those whose hosts say so; `""` for requests without a tenant, and for what the worker itself saw.
        told: whether the edit is to be disabled for them.
    """

    count: int = 0
    tenants: set[str] = field(default_factory=set)
    told: bool = False

    @property
    def is_believed(self) -> bool:
        """Whether somebody else than the blocks of one tenant says so."""
        return "" in self.tenants or len(self.tenants) > 1


class RequestEdits:
    """The edits that run on one request, in order."""

    def __init__(self, edits: Sequence[RunnableEdit] = ()) -> None:
        self.edits = tuple(edits)
        blocks = [edit.block for edit in self.edits if edit.block is not None]
        #: The encoded blocks of the edits for the workers; `None` if there are none.
        self.blocks = _encoder.encode(blocks) if blocks else None
        #: Whether the edits have declared interventions that save; whether one of the edits can end the request.
        self.reads = any(edit.reads for edit in self.edits)
        self.fatal = any(edit.fatal for edit in self.edits)

    def __bool__(self) -> bool:
        return bool(self.edits)

    def declared(self, own: bytes | None) -> bytes | None:
        """The declared interventions of the edits, then the request's own, encoded for the workers."""
        before = [raw for edit in self.edits for raw in edit.placed]
        if not before:
            return own
        return _encoder.encode([*before, *(_raws.decode(own) if own else ())])

    @property
    def versions(self) -> list[tuple[str, int]]:
        """The names and versions of the edits."""
        return [(edit.name, edit.version) for edit in self.edits]


class StandingEdits:
    """The edits of one engine's model. `check_block` refuses a block that cannot run, and `permit` makes the workers'
    permit for a block; `announce` renews the registry's entry of the engine, which says what it runs. `gate` verifies
    the signatures of edits and of their removals.
    """

    def __init__(
        self,
        bus: Bus,
        info: EngineInfo,
        placer: Placer,
        check_block: Callable[[Block, Key | None], Awaitable[str]],
        announce: Callable[[], Awaitable[None]],
        permit: Callable[[bytes], bytes] = lambda block: b"",
        gate: Gate | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._bus = bus
        self._info = info
        self._placer = placer
        self._check_block = check_block
        self._announce = announce
        self._permit = permit
        self._gate = gate
        self._audit = audit
        #: The versions of edits that stand in the audit trail, and when they were installed.
        self._noted: dict[str, tuple[int, float]] = {}
        self._ready: list[RunnableEdit] = []
        #: The edits that a key has signed and that were installed last, in order.
        self._signed: dict[str, Installed] = {}
        #: By name, why an edit runs on that is installed no longer.
        self._held_for: dict[str, str] = {}
        #: By name, why an installed edit does not run on this engine.
        self._refused: dict[str, str] = {}
        self._generation = -1
        #: The last change before the edits were read.
        self._last_change: LastChange | None = None
        #: The state of the keyring by which the edits were read.
        self._keys: object = None
        self._chosen: dict[tuple[int, tuple[str, ...] | None], RequestEdits] = {}
        #: On how many requests in a row each version of an edit has raised.
        self._streaks: dict[tuple[str, int], _Streak] = {}
        self._disabling: deque[tuple[str, int, str]] = deque()
        self._records: deque[tuple[str, bytes]] = deque()
        self._waiting = 0
        self._new = Signal()
        self._done = Signal()

    # --- what is installed ------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read the edits whenever they change. Never ends by itself."""
        changes = self._bus.edits.changes(self._info.model)
        try:
            while True:
                try:
                    await changes.wait(_LOOK_MS)
                    await self.refresh()
                except BusError as error:
                    logger.warning("the edits of %s cannot be read: %s", self._info.model, error)
                    await anyio.sleep(_LOOK_MS / 1000)
        finally:
            with anyio.CancelScope(shield=True):
                await changes.aclose()

    async def refresh(self) -> None:
        """Read the edits if they or the keys have changed, and renew the engine's registry entry, which lists them.

        Raises:
            BusError: the edits cannot be read, or the registry cannot be written.
        """
        edits = self._bus.edits
        keys = None if self._gate is None else self._gate.keyring_state()
        last_change = await edits.last_change(self._info.model)
        if last_change == self._last_change and keys == self._keys:
            return
        await self.take(await edits.load(self._info.model, None if self._gate is None else self._gate.edit))
        self._last_change, self._keys = last_change, keys
        await self._announce()

    async def take(self, edits: EditSet) -> None:
        """Run these edits from now on, without those that this engine cannot run."""
        ready: list[RunnableEdit] = []
        refused: dict[str, str] = {}
        edits, errors = self._held(edits)
        for one in edits.edits:
            if one.disabled:
                refused[one.name] = f"it is disabled: {one.disabled}"
                continue
            try:
                ready.append(await self._check(one))
            except Rejection as rejection:
                failure = rejection.failure
                errors[one.name] = refused[one.name] = f"{failure.field}: {failure.message}"
            except Exception as error:  # hostile content of one edit must not stop the others
                logger.exception("edit %s could not be checked", one.name)
                errors[one.name] = refused[one.name] = f"{type(error).__name__}: {error}"
        self._note(edits, errors)
        self._ready, self._refused, self._generation, self._chosen = ready, refused, edits.generation, {}
        known = {(edit.name, edit.version) for edit in ready}
        self._streaks = {key: streak for key, streak in self._streaks.items() if key in known}
        self._info.edits, self._info.edit_errors = edits.generation, errors
        failures = self._info.edit_failures
        # A counter of an edit that is gone would never end.
        self._info.edit_failures = {one.name: failures[one.name] for one in edits.edits if one.name in failures}

    def _held(self, edits: EditSet) -> tuple[EditSet, dict[str, str]]:
        """The edits as a strict engine takes them, and why it does not take a change, by name.

        An edit that a key has signed runs until a signed edit replaces it, or a signed order removes it.
        """
        errors: dict[str, str] = {}
        found = {one.name: one for one in edits.edits}
        if self._gate is not None and self._gate.strict:
            for name, before in self._signed.items():
                now = found.get(name)
                if (now is not None and now.signer is not None) or not self._is_valid(before.signer):
                    continue
                try:
                    key = self._gate.removal(name, before.version, *edits.removals.get(name, (0, b"")))
                except SignatureRefused as error:
                    errors[name] = f"its {'removal' if now is None else 'replacement'} is refused: {error}"
                    found[name] = before
                    self._note_held(name, errors[name])
                    continue
                if now is None and self._audit is not None:
                    self._audit.accepted("remove edit", name, key)
            # Versions go up; a name keeps its place where it had one.
            places = {name: place for place, name in enumerate(self._signed)}
            ordered = sorted(found.values(), key=lambda one: places.get(one.name, len(places)))
            edits = EditSet(edits.generation, tuple(ordered) if errors else edits.edits)
        self._signed = {one.name: one for one in edits.edits if one.signer is not None}
        self._held_for = {name: why for name, why in self._held_for.items() if name in errors}
        return edits, errors

    def _is_valid(self, signer: Key | None) -> bool:
        """Whether the key that has signed an edit was not revoked since. An edit does not outlive that."""
        key = None if signer is None or self._gate is None else self._gate.key(signer.id)
        return key is not None and key.revoked is None

    def _note_held(self, name: str, why: str) -> None:
        """Say once why an edit runs on."""
        if self._held_for.get(name) == why:
            return
        self._held_for[name] = why
        logger.warning("edit %s runs on: %s", name, why)
        if self._audit is not None:
            self._audit.refused("remove edit", name, why)

    def _note(self, edits: EditSet, errors: dict[str, str]) -> None:
        """Write new versions of edits to the audit trail. `errors` says why edits do not run, by name."""
        noted, self._noted = self._noted, {one.name: (one.version, one.time) for one in edits.edits}
        for one in edits.edits if self._audit is not None else ():
            assert self._audit is not None
            if noted.get(one.name) == (one.version, one.time):
                continue
            by = "" if one.edit is None else one.edit.by
            if one.name in errors:
                self._audit.refused("edit", one.name, errors[one.name], one.signer, by=by)
            else:
                self._audit.accepted("edit", one.name, one.signer, by=by)

    async def _check(self, installed: Installed) -> RunnableEdit:
        edit = installed.edit
        if edit is None:
            raise Rejection("edit", installed.problem)
        if edit.block is None and not edit.interventions:
            raise Rejection("edit", "it has neither a block nor declared interventions")
        if any(isinstance(one, StopWhen) for one in edit.interventions):
            raise Rejection("interventions", "StopWhen belongs to a trace: an edit ends no request")
        block = None
        if edit.block is not None:
            await self._check_block(edit.block, installed.signer)
            encoded = _encoder.encode(edit.block)
            block = EditBlock(edit.name, msgspec.Raw(encoded), edit.on_error == "fail", self._permit(encoded))
        for index, one in enumerate(edit.interventions):
            if isinstance(one, Patch) and one.prompt is not None:
                raise Rejection(f"interventions[{index}].prompt", "an edit runs on prompts of any traces: give values")
        for index, name, value in array_fields(edit.interventions):
            if isinstance(value, ArrayRef):
                raise Rejection(f"interventions[{index}].{name}", "expected an array: an edit has no references")
        placed = self._placer.place(edit.interventions, {})
        return RunnableEdit(
            name=edit.name,
            version=installed.version,
            scope=edit.scope,
            fatal=edit.on_error == "fail",
            max_failures=edit.max_failures,
            block=block,
            placed=[msgspec.Raw(_encoder.encode(_renamed(one, edit))) for one in placed],
            reads=any(isinstance(one, Reading) for one in edit.interventions),
        )

    # --- which run on a request -------------------------------------------------------------------------------------

    def choose(self, asked: list[str] | None, field: str = "edits") -> RequestEdits:
        """The edits that run on a request that is taken now.

        Args:
            asked: the names of the edits that the request asks for; `None` if it does not say.
            field: is named in errors.

        Raises:
            Rejection: the request asks for an edit that does not run here.
        """
        if not self._ready and not asked:
            return _NONE
        key = self._generation, None if asked is None else tuple(asked)
        chosen = self._chosen.get(key)
        if chosen is None:
            names = [edit.name for edit in self._ready]
            for name in asked or ():
                if name in self._refused:
                    raise Rejection(field, f"edit {name!r} does not run on {self._info.model!r}: {self._refused[name]}")
                if name not in names:
                    installed = ", ".join(map(repr, names)) or "none"
                    raise Rejection(
                        field,
                        f"no edit {name!r} is installed on {self._info.model!r} (installed: {installed})",
                        type="UnknownEdit",
                    )
            chosen = RequestEdits([edit for edit in self._ready if selected(edit.scope, edit.name, asked)])
            if len(self._chosen) < 1024:
                self._chosen[key] = chosen
        return chosen

    # --- what they leave --------------------------------------------------------------------------------------------

    def count_end(
        self, chosen: RequestEdits, record: FinishRecord, trace: str = "", invoke: int = 0, tenant: str = ""
    ) -> None:
        """Count the edits that raised on a choice that has ended. For a trace, also queue records of their errors.

        A block can forge the reports of its host, in which blocks of its tenant run. So the word of hosts of one
        `tenant` alone disables no edit.
        """
        for edit in chosen.edits:
            key = edit.name, edit.version
            failure = record.edit_errors.get(edit.name)
            if failure is None or (record.hosted and edit.block is None):
                self._streaks.pop(key, None)
                continue
            if trace:
                entry = EditRecord(
                    edit=edit.name,
                    version=edit.version,
                    engine=self._info.engine,
                    request=record.request,
                    trace=trace,
                    invoke=invoke,
                    choice=record.choice,
                    time=time.time(),
                    error=failure,
                )
                self._queue_record(entry)
            streak = self._streaks.setdefault(key, _Streak())
            streak.count += 1
            streak.tenants.add(tenant if record.hosted else "")
            self._info.edit_failures[edit.name] = self._info.edit_failures.get(edit.name, 0) + 1
            if edit.max_failures and streak.count >= edit.max_failures and streak.is_believed and not streak.told:
                streak.told = True
                why = (
                    f"it raised on {streak.count} requests of engine {self._info.engine} in a row, "
                    f"last {failure.type}: {failure.message}"
                )
                self._disabling.append((edit.name, edit.version, why[:2000]))
                self._new.notify()

    def queue_records(
        self, chosen: RequestEdits, pending: PendingRecords, request: str, tokens: list[int], reasons: list[str | None]
    ) -> None:
        """Queue records of the edits' saves on an ended request that is not a trace.

        Args:
            chosen: the edits.
            pending: has all reports of the request.
            request: the client's id of the request.
            tokens: how many tokens each choice has.
            reasons: the finish reason of each choice.
        """
        dropped = f"the saves of edits on the request take more than {RECORD_BYTES} bytes" if pending.dropped else ""
        for index, choice in enumerate(pending.choices):
            record = choice.finish
            if record is None or not pending.choice_complete(index):
                logger.warning("the workers' reports of edits on request %s are incomplete; none is published", request)
                continue
            self.count_end(chosen, record)
            left = choice.take_rest(tokens[index])
            choice.digests.complete(record.deltas, record.manifest)
            manifest = [*record.manifest, *choice.reads.manifest(index, tokens[index])]
            deltas = split_by_edit([*left, record.deltas])
            for edit in chosen.edits:
                before = f"{edit.name}/"
                entry = EditRecord(
                    edit=edit.name,
                    version=edit.version,
                    engine=self._info.engine,
                    request=request,
                    choice=index,
                    time=time.time(),
                    tokens=tokens[index],
                    finish_reason=reasons[index],
                    deltas=msgspec.Raw(_encoder.encode([] if dropped else [deltas.get(edit.name, [])])),
                    blobs=pending.trace,
                    manifest=[]
                    if dropped
                    else [
                        msgspec.structs.replace(entry, name=entry.name.removeprefix(before))
                        for entry in manifest
                        if entry.name.startswith(before)
                    ],
                    save_errors={
                        name.removeprefix(before): why
                        for name, why in record.save_errors.items()
                        if name.startswith(before)
                    },
                    error=record.edit_errors.get(edit.name),
                    dropped=dropped,
                )
                self._queue_record(entry)

    def _queue_record(self, record: EditRecord) -> None:
        data = encode(record)
        if len(data) > RECORD_BYTES:
            why = f"they take {len(data)} bytes, an entry of the stream may take {RECORD_BYTES}"
            data = encode(msgspec.structs.replace(record, deltas=_NO_DELTAS, manifest=[], dropped=why))
        self._records.append((record.edit, data))
        self._waiting += len(data)
        if self._waiting > _WAITING_BYTES:
            edit, oldest = self._records.popleft()
            self._waiting -= len(oldest)
            logger.warning("a record of edit %s was dropped: too many records wait for Redis", edit)
        self._new.notify()

    @property
    def _outstanding(self) -> bool:
        return bool(self._records or self._disabling)

    async def flushed(self) -> None:
        """Wait until Redis has all records. Only one task at a time may wait."""
        while self._outstanding:
            await self._done.wait()

    async def publish(self) -> None:
        """Publish the queued records, and disable edits that raise too often. Never ends by itself."""
        edits, model = self._bus.edits, self._info.model
        while True:
            while not self._outstanding:
                self._done.notify()
                await self._new.wait()
            try:
                while self._disabling:
                    name, version, why = self._disabling[0]
                    try:
                        if await edits.disable(model, name, version, why):
                            logger.warning("edit %s is disabled: %s", name, why)
                    except BusUnavailable:
                        raise
                    except BusError as error:
                        # Redis would refuse it again, and the other records would wait. The edit is disabled after as
                        # many further failures.
                        self._streaks.pop((name, version), None)
                        logger.error("edit %s could not be disabled, though %s: %s", name, why, error)
                    self._disabling.popleft()
                while self._records:
                    edit, data = self._records[0]
                    try:
                        await edits.publish(model, edit, data)
                    except BusUnavailable:
                        raise
                    except BusError as error:
                        # Redis would refuse it again.
                        logger.warning("a record of edit %s is lost: %s", edit, error)
                    if self._records and self._records[0][1] is data:
                        self._records.popleft()
                        self._waiting -= len(data)
            except BusError as error:
                logger.warning("records of edits wait for Redis: %s", error)
                await anyio.sleep(_LOOK_MS / 1000)


def _renamed(placed: Placed, edit: Edit) -> Placed:
    one = placed.intervention
    if isinstance(one, Hold):
        one = msgspec.structs.replace(one, probe=f"{edit.name}/{one.probe}")
    if isinstance(one, Reading):
        one = msgspec.structs.replace(one, name=f"{edit.name}/{one.name}")
    if one.when is not None and one.when.probe is not None:
        when = msgspec.structs.replace(one.when, probe=f"{edit.name}/{one.when.probe}")
        one = msgspec.structs.replace(one, when=when)
    return Placed(one, placed.sites, placed.pattern)


_NONE = RequestEdits()
