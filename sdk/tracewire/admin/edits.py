"""Standing interventions: blocks and declared interventions that run on the requests of a model until they are removed.

    edits = client.edits("demo")
    await edits.install("calm", steer_block(scale=4.0))
    ...
    await edits.remove("calm")

An edit is installed by name on all engines of the model: on the live ones, and on those that start later. Its saves on
a trace are among the trace's saves, as `"calm/norms"`. Its saves on requests of plain HTTP clients come from `watch`.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec

from tracewire.capture.intervention import Intervention
from tracewire.checks import Duration, check_limit, check_text, shown
from tracewire.error_mapping import bus_errors
from tracewire.errors import (
    EditConflict,
    EditPending,
    InvalidEdit,
    MalformedEvent,
    StateMismatch,
    TooManyEdits,
    TraceRejected,
    UnknownEdit,
)
from tracewire.submission import checked_block, checked_interventions
from tracewire.traces.large import LargeValues
from tracewire.traces.model_checks import check_paths
from tracewire.traces.readers import Watcher
from tracewire_bus.domain.fold import FoldError, apply_delta
from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.store.edits import EDIT_BYTES, EditRecords, EditsFull, Installed, VersionDiffers, is_edit_name
from tracewire_bus.store.edits import UnknownEdit as NoSuchEdit
from tracewire_bus.wire.codec import decode_deltas
from tracewire_bus.wire.digests import digest, former_digest
from tracewire_bus.wire.messages import Block, Declared, DeclaredIntervention, EditRecord, Failure, Patch, StopWhen
from tracewire_bus.wire.messages import Edit as EditMessage
from tracewire_bus.wire.packing import pack

from .listing import Listing

if TYPE_CHECKING:
    from tracewire.traces.served_models import ServedModel
    from tracewire.traces.session import Session
    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo

__all__ = ["Edit", "EditOutput", "EditWatch", "Edits"]

logger = logging.getLogger("tracewire")

#: How often the client checks whether the engines follow a change, in seconds.
_POLL_S = 0.05


class Edit(msgspec.Struct, frozen=True):
    """An installed standing intervention.

    Attributes:
        name: the edit's name.
        version: number of the change that installed it. Each change of the model's edits has a greater number.
        time: when it was installed, in seconds since the epoch by Redis's clock.
        scope: the requests that it runs on. `"all"`: all. `"asked"`: those that ask for it by name. `"default"`: these,
            and those that name no edits at all.
        on_error: what happens to a request on which it raises: `"continue"` or `"fail"`.
        max_failures: after how many failures in a row an engine disables it; 0 for never.
        by: name of the client that installed it.
        block: name of its block, or None.
        filename, line: where the block's source begins, or None.
        interventions: its declared interventions.
        disabled: why it was disabled; `""` if it was not.
        engines: names of the live engines that run it.
        problems: why the other live engines do not run it, by engine.
    """

    name: str
    version: int
    time: float
    scope: str = "all"
    on_error: str = "continue"
    max_failures: int = 10
    by: str = ""
    block: str | None = None
    filename: str | None = None
    line: int | None = None
    interventions: tuple[Declared, ...] = ()
    disabled: str = ""
    engines: tuple[str, ...] = ()
    problems: dict[str, str] = {}

    @classmethod
    def of(cls, one: Installed, engines: Sequence[EngineInfo]) -> Edit:
        """An installed edit, with the live engines that run it and the problems of the others."""
        behind = "it has not followed the last change yet"
        problems = {
            engine.engine: engine.edit_errors.get(one.name) or behind
            for engine in engines
            if engine.edits < one.version or one.name in engine.edit_errors
        }
        if one.edit is None:
            return cls(one.name, one.version, one.time, disabled=one.disabled or one.problem, problems=problems)
        edit, block = one.edit, one.edit.block
        return cls(
            one.name,
            one.version,
            one.time,
            scope=edit.scope,
            on_error=edit.on_error,
            max_failures=edit.max_failures,
            by=edit.by,
            block=block.name if block is not None else None,
            filename=block.filename if block is not None else None,
            line=block.first_line if block is not None else None,
            interventions=tuple(edit.interventions),
            disabled=one.disabled,
            engines=() if one.disabled else tuple(e.engine for e in engines if e.engine not in problems),
            problems=problems,
        )


class EditOutput(msgspec.Struct, frozen=True):
    """An edit's saves, and its error, on one choice of one request that has ended.

    Attributes:
        id: the item's position, for `watch(since=...)`.
        edit, version: name and version of the edit.
        engine: name of the engine that ran the request.
        request: the request's id, as its client knows it.
        trace_id: the trace's id if the request belongs to a trace, else `""`. The item of a trace has only the `error`;
            the saves are the trace's.
        invoke, choice: indices of the prompt and of the sampled sequence, both from 0.
        time: when the request ended, in seconds since the epoch.
        tokens: how many tokens were sampled.
        finish_reason: why the choice ended, in vLLM's word.
        saves: the edit's saves, by name.
        save_errors: saves that could not travel, by name, with the reason.
        error: the error that the edit raised, or None.
        dropped: why `saves` is empty although the edit saved something: it was too large. `""` otherwise.
    """

    id: str
    edit: str
    version: int
    engine: str
    request: str
    trace_id: str
    invoke: int
    choice: int
    time: float
    tokens: int
    finish_reason: str | None
    saves: dict[str, Any]
    save_errors: dict[str, str]
    error: Failure | None
    dropped: str

    @classmethod
    def of(cls, id_: str, record: EditRecord, bus: Bus) -> EditOutput:
        """A record of the bus, folded and compared with its manifest.

        Raises:
            MalformedEvent: the record cannot be read.
            StateMismatch: the folded saves differ from the engine's digests.
        """
        saves: dict[str, Any] = {}
        try:
            steps = decode_deltas(record.deltas, LargeValues(record.blobs, bus).load)
            for delta in (delta for step in steps for delta in step):
                apply_delta(saves, delta)
        except (msgspec.MsgspecError, FoldError) as error:
            raise MalformedEvent(f"entry {id_} of edit {record.edit!r} cannot be read: {error}") from error
        wanted = {entry.name: entry.digest for entry in record.manifest}
        held = {name: digest(value) for name, value in saves.items()}
        wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        # Engines before schema 2.0 took other digests.
        wrong = [name for name in wrong if name not in saves or former_digest(saves[name]) != wanted.get(name)]
        if wrong:
            raise StateMismatch(
                f"entry {id_} of edit {record.edit!r} differs from what the engine collected: {', '.join(wrong)}", wrong
            )
        names = set(cls.__struct_fields__) - {"id", "saves", "trace_id"}
        return cls(id=id_, saves=saves, trace_id=record.trace, **{name: getattr(record, name) for name in names})


class Edits:
    """A model's edits, as `Client.edits` returns them. It caches nothing: each call asks Redis."""

    def __init__(self, session: Session, model: str) -> None:
        self._session = session
        self.model = model

    def __repr__(self) -> str:
        return f"<Edits of {self.model!r}>"

    async def install(
        self,
        name: str,
        block: Intervention | Block | None = None,
        *,
        interventions: Sequence[DeclaredIntervention] = (),
        scope: Literal["all", "default", "asked"] = "all",
        on_error: Literal["continue", "fail"] = "continue",
        max_failures: int = 10,
        replacing: int | None = None,
        timeout: Duration | None = 10.0,
    ) -> Edit:
        """Install an edit: a block, declared interventions, or both. It replaces an installed edit of the same name.

        Requests that an engine takes from then on run the edit; running requests keep the edits that they began with.
        Several edits apply in the order in which their names were first installed: the declared interventions of all of
        them, then their blocks, then the trace's own. `scope` says which requests run it. `"all"`: all. `"asked"`:
        those that ask for it by name (`client.trace(..., edits=["name"])`). `"default"`: these, and those that name no
        edits at all.

        When the edit raises on a request, the request goes on without the edit, or fails with `on_error="fail"`. After
        `max_failures` requests of an engine in a row on which the edit raised (0: no limit), the edit is disabled.
        `watch` yields the errors; on a trace they are also among the trace's `save_errors`.

        `replacing` is the version that must be installed, 0 for none; with another one installed, the call raises
        `EditConflict`. The call returns when all live engines run the edit, and waits up to `timeout` seconds for them;
        with `None` it waits without limit. With 0 it does not wait, and needs no live engine.

        Raises:
            EditRejected: the edit cannot be installed; `field` names the part at fault. If an engine refused the edit,
                the edit that was installed before is installed again, and the call waits for the engines to run it.
            UnknownModulePath: the block names a module that the model does not have.
            UnknownModel: no live engine serves the model.
            EditPending: the edit is installed, but some engines have not confirmed yet that they run it.
            BusUnavailable: Redis does not answer; the edit may have been installed.
            ValueError: `timeout` is negative.
        """
        edit = self._checked_message(name, block, interventions, scope, on_error, max_failures)
        if replacing is not None and (type(replacing) is not int or replacing < 0):
            raise InvalidEdit(name, "replacing", f"expected a version's number, or 0 for none, got {replacing!r}")
        limit = check_limit("timeout", timeout)
        if limit:
            model = await self._session.models.find(self.model)
            edit = await self._with_arrays(edit, model)
            self._check_against(edit, model)
        bus = self._session.open_bus()
        with bus_errors():
            before = next((one for one in (await bus.edits.load(self.model)).edits if one.name == name), None)
            try:
                version = await bus.edits.install(self.model, edit, replacing=replacing)
            except VersionDiffers as error:
                raise EditConflict(name, str(error), error.version) from None
            except EditsFull as error:
                raise TooManyEdits(name, str(error)) from None
            for engine in await self._wait_for_engines(name, version, limit):
                if (reason := engine.edit_errors.get(name)) is not None:
                    await self._restore(name, version, before, limit)
                    field, _, message = reason.partition(": ")
                    raise InvalidEdit(name, field, f"{message} (says engine {engine.engine})")
        return await self.get(name)

    async def _restore(self, name: str, version: int, before: Installed | None, limit: float) -> None:
        """Install the earlier edit again after an engine refused `version`, unless another client has replaced that.

        Waits up to `limit` seconds for the engines to run it.
        """
        edits = self._session.open_bus().edits
        try:
            if before is None or before.edit is None:
                await edits.remove(self.model, name, version=version)
            else:
                again = await edits.install(self.model, before.edit, replacing=version)
                if before.disabled:
                    await edits.disable(self.model, name, again, before.disabled)
                await self._wait_for_engines(name, again, limit)
        except (NoSuchEdit, VersionDiffers, EditPending):
            return

    def list(self) -> Listing[Edit]:
        """The installed edits, in the order in which they apply."""

        async def pages() -> AsyncIterator[Sequence[Edit]]:
            bus = self._session.open_bus()
            with bus_errors():
                found = await bus.edits.load(self.model)
                engines = [engine for engine in await bus.registry.list() if engine.model == self.model]
            yield [Edit.of(one, engines) for one in found.edits]

        return Listing(pages)

    async def get(self, name: str) -> Edit:
        """The installed edit of this name.

        Raises:
            UnknownEdit: none of this name is installed.
            BusUnavailable: Redis does not answer.
        """
        for edit in await self.list():
            if edit.name == name:
                return edit
        raise UnknownEdit(name, f"there is no edit {name!r} on {self.model!r}")

    async def remove(self, name: str, *, version: int | None = None, timeout: Duration | None = 10.0) -> None:
        """Remove an edit, or only this `version` of it. Requests that engines take from then on run without it.

        The call returns when all live engines have confirmed the removal. `timeout` is as for `install`.

        Raises:
            UnknownEdit: no edit of this name, or of this version, is installed.
            EditPending: the edit is removed, but some engines have not confirmed yet.
            BusUnavailable: Redis does not answer; the edit may have been removed.
            ValueError: `timeout` is negative.
        """
        limit = check_limit("timeout", timeout)
        bus = self._session.open_bus()
        with bus_errors():
            try:
                generation = await bus.edits.remove(self.model, name, version=version)
            except NoSuchEdit as error:
                raise UnknownEdit(name, str(error)) from None
            await self._wait_for_engines(name, generation, limit)

    async def clear(self, *, timeout: Duration | None = 10.0) -> None:
        """Remove all edits of the model, each as `remove` does."""
        for edit in await self.list():
            try:
                await self.remove(edit.name, version=edit.version, timeout=timeout)
            except UnknownEdit:
                continue

    def watch(self, name: str, *, since: str = "now") -> EditWatch:
        """An endless async iterator of `EditOutput` items: the edit's saves on requests that are no traces, and its
        errors on all requests. An item comes when its request has ended.

        `since` is `"now"`, `"start"`, or an item's id. From `"start"` it reads what Redis keeps: 64 MiB of each edit,
        for a day. It reads the items of all versions of the edit, over a connection of its own.

        Raises:
            ValueError: `since` is none of these, or no edit can have this name.
        """
        bus = self._session.open_bus()
        if not is_edit_name(check_text("name", name)):
            raise ValueError(f"name: no edit can be called {shown(name)}")
        try:
            return EditWatch(bus, bus.edit_records(self.model, name, check_text("since", since)))
        except ValueError:
            raise ValueError(f"since is 'start', 'now' or an item's id, not {since!r}") from None

    # --- checks -------------------------------------------------------------------------------------------------------

    def _checked_message(
        self, name: Any, block: Any, interventions: Any, scope: Any, on_error: Any, max_failures: Any
    ) -> EditMessage:
        if not isinstance(name, str) or not is_edit_name(name):
            expected = "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
            raise InvalidEdit(str(name)[:80], "name", f"{expected}, got {name!r}"[:200])
        for where, value, words in (
            ("scope", scope, ("all", "default", "asked")),
            ("on_error", on_error, ("continue", "fail")),
        ):
            if value not in words:
                raise InvalidEdit(name, where, f"expected one of {', '.join(map(repr, words))}, got {value!r}")
        if type(max_failures) is not int or not 0 <= max_failures < 2**31:
            raise InvalidEdit(name, "max_failures", f"expected a number, or 0, got {max_failures!r}")
        try:
            plain, declared = checked_block(block), checked_interventions(interventions)
        except TraceRejected as error:
            if type(error) is not TraceRejected:
                raise
            raise InvalidEdit(name, error.field, error.message) from None
        if plain is None and not declared:
            raise InvalidEdit(name, "block", "expected an intervention, declared interventions, or both; got neither")
        for index, one in enumerate(declared):
            where = f"interventions[{index}]"
            if isinstance(one, StopWhen):
                raise InvalidEdit(name, where, "StopWhen belongs to a trace: an edit ends no request")
            if isinstance(one, Patch) and one.prompt is not None:
                raise InvalidEdit(name, f"{where}.prompt", "an edit runs on prompts of any traces: give values")
        if plain is not None:
            self._check_live(name, plain)
        edit = EditMessage(
            name=name,
            scope=scope,
            block=plain,
            interventions=declared,
            on_error=on_error,
            max_failures=max_failures,
            by=self._session.name,
        )
        size = len(msgspec.msgpack.encode(edit))
        if size > EDIT_BYTES:
            raise InvalidEdit(
                name,
                "block",
                f"it takes {size} bytes with its variables, and every request brings it: {EDIT_BYTES} at most",
            )
        return edit

    @staticmethod
    def _check_live(name: str, block: Block) -> None:
        try:
            tree = parse_source(block.source)
        except SyntaxError as error:
            line = (error.lineno or 1) + block.first_line - 1
            raise InvalidEdit(name, "block", f"it does not compile at line {line}: {error.msg}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == block.parameters[2]:
                line = node.lineno + block.first_line - 1
                raise InvalidEdit(
                    name,
                    "block",
                    f"an edit has no live parameters (line {line} of {block.filename}): bind a variable, "
                    "and install the edit anew to change it",
                )

    async def _with_arrays(self, edit: EditMessage, model: ServedModel) -> EditMessage:
        """An edit with arrays in place of names of the library."""
        try:
            found, _ = await self._session.library.resolve(edit.interventions, model)
        except TraceRejected as error:
            raise InvalidEdit(edit.name, error.field, error.message) from None
        return msgspec.structs.replace(edit, interventions=found)

    def _check_against(self, edit: EditMessage, model: ServedModel) -> None:
        from tracewire_bus.domain.intervention_checks import DeclarationError, check_encoded

        if edit.block is not None:
            check_paths(edit.block, model.trees)
        try:
            check_encoded(edit.interventions, pack({}), model.trees, hidden_size=model.info.hidden_size)
        except DeclarationError as error:
            message = re.sub(r"was not declared at submission.*", "cannot be used: an edit has none", error.message)
            raise InvalidEdit(edit.name, error.field, message) from None

    async def _wait_for_engines(self, name: str, generation: int, timeout: float) -> Sequence[EngineInfo]:
        """Wait up to `timeout` seconds until all live engines of the model have confirmed this change, and return them.

        With 0 the client does not wait, and returns none.

        Raises:
            EditPending: some engines have not confirmed it.
        """
        if not timeout:
            return ()
        bus = self._session.open_bus()
        behind: list[str] = []
        with anyio.move_on_after(timeout):
            while True:
                engines = [engine for engine in await bus.registry.list() if engine.model == self.model]
                behind = [engine.engine for engine in engines if engine.edits < generation]
                if not behind:
                    return engines
                await anyio.sleep(_POLL_S)
        raise EditPending(name, behind, timeout)


class EditWatch(Watcher[tuple[str, EditRecord]]):
    """An endless async iterator of `EditOutput` items, and an async context manager.

    Reading begins with `start()`, with entering, or with the first item; `since="now"` means that moment. The watch
    owns no task and reads an item only when the caller asks for it. While Redis does not answer, it waits.
    """

    def __init__(self, bus: Bus, records: EditRecords) -> None:
        super().__init__(records)
        self._bus = bus

    async def __anext__(self) -> EditOutput:
        """Wait for the next item.

        Raises:
            StopAsyncIteration: the watch was closed.
            MalformedEvent: an item cannot be read. The next call goes on after it.
            StateMismatch: an item's saves differ from the engine's digests. The next call goes on after it.
            BusRefused: Redis refuses.
            ClientClosed: the client was closed.
        """
        id_, record = await self._next()
        return EditOutput.of(id_, record, self._bus)
