"""The state of a trace, folded from its events in order.

Every consumer folds, the SDK included. A `Fold` takes the events one by one and refuses gaps and repeats. At the end it
compares the folded saves with the digests that the engine published: a verified fold holds exactly the values that
nnsight collected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from tracewire_bus.wire.columns import layout_of, record_digest
from tracewire_bus.wire.digests import digest, former_digest, list_digest
from tracewire_bus.wire.kinds import Unsavable, decode_key
from tracewire_bus.wire.messages import (
    SHARED_INVOKE,
    Accepted,
    Append,
    ChatMessage,
    Columns,
    ColumnsManifest,
    Delete,
    Delta,
    Event,
    Failure,
    Final,
    HeldChoice,
    Manifest,
    MessageDelta,
    Notice,
    OutputBase,
    Paused,
    Restarted,
    Resumed,
    Set,
    Snapshot,
    Status,
    SteeredBase,
    ToolCall,
    Usage,
)

__all__ = ["ChoiceState", "DigestMismatch", "Fold", "FoldError", "apply_delta", "extended"]

_CONTAINERS = frozenset({list, dict, tuple, set})


class FoldError(ValueError):
    """An event cannot be applied to the state: a gap, a repeat, or a delta whose path leads nowhere."""


class DigestMismatch(ValueError):
    """Folded saves differ from those on the engine.

    Attributes:
        names: the saves that differ, as `invoke.choice.name`.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"folded saves differ from the engine's: {', '.join(names)}")
        self.names = names


class ChoiceState:
    """The output and the saves of one choice of one invoke, up to an event.

    Records of columns are kept as they came; `saves` makes arrays of them when a caller first asks for it.

    Attributes:
        values: the values that came by all other deltas, by saved name.
        records: the records of columns: the layout and the values of each.
        record_digests: the digests of all records that came, in order.
        column_names: the saved names that came by columns.
        digests: by name of a saved list, the digests of its first items, as far as the fold took them.
        token_ids: the ids of the sampled tokens.
        token_strings: the tokens' strings, one a token; `None` if the engine sends none.
        finish_reason: why the choice ended, as vLLM reports it; `None` while it runs.
        stop_reason: the stop string or token id that ended the choice, if one did.
        message: the message of a chat's choice, folded from outputs, and in the end as the final has it; else `None`.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.records: list[tuple[bytes, memoryview]] = []
        self.record_digests: list[bytes] = []
        self.column_names: set[str] = set()
        self._layout: bytes | None = None
        #: Lists of the items of the first `_made` records, by name.
        self._lists: dict[str, list[Any]] = {}
        self._made = 0
        self.digests: dict[str, list[bytes]] = {}
        self.token_ids: list[int] = []
        self.token_strings: list[str] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.message: ChatMessage | None = None
        self._text: list[str] = []

    @property
    def saves(self) -> dict[str, Any]:
        """The saved values by name. Callers must not change the dict."""
        if not self.records:
            return self.values
        for layout, values in self.records[self._made :]:
            for name, item in layout_of(layout).items(values):
                self._lists.setdefault(name, []).append(item)
        self._made = len(self.records)
        return {**self.values, **self._lists}

    def add_record(self, record: Columns, names: frozenset[str] | None = None) -> None:
        """Take a record of columns, of which `names` are kept (`None`: all).

        Raises:
            FoldError: it has no layout, or other values than its layout says.
        """
        encoded, values = record.layout, record.values
        try:
            layout = layout_of(encoded)
        except ValueError as error:
            raise FoldError(f"a record of columns has no layout: {error}") from error
        if len(values) != layout.nbytes:
            raise FoldError(f"a record of columns takes {layout.nbytes} bytes, got {len(values)}")
        self.record_digests.append(record_digest(encoded, values))
        if names is not None:
            wanted = names.intersection(layout.names)
            if not wanted:
                return
            if len(wanted) < len(layout.names):
                encoded, values = layout.cut(values, wanted)
        if encoded != self._layout:
            found = layout_of(encoded).names
            if not self.values.keys().isdisjoint(found):
                raise FoldError(f"a record of columns names {sorted(self.values.keys() & set(found))}, saved otherwise")
            self.column_names.update(found)
            self._layout = encoded
        self.records.append((encoded, values))

    @property
    def text(self) -> str:
        """The text of the choice so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def update_digests(self, delta: Delta) -> None:
        """Update `digests` after `delta` was applied to `values`."""
        if isinstance(delta, Columns):
            return
        name = delta.path[0]
        if len(delta.path) > 1:
            # The delta changed an item: `digest_of` takes the digests of that item and of all after it.
            index = delta.path[1]
            known = self.digests.get(name)
            if known is not None:
                del known[index if type(index) is int else 0 :]
        elif isinstance(delta, Append):
            known, items = self.digests.setdefault(name, []), self.values[name]
            if len(known) + len(delta.items) == len(items):
                known.extend(digest(item) for item in delta.items)
        else:
            self.digests.pop(name, None)
            value = self.values.get(name)
            if type(value) is list:
                self.digests[name] = [digest(item) for item in value]

    def digest_of(self, name: str) -> bytes:
        """The digest of `values[name]`, from the digests of its items where they are known."""
        value, known = self.values[name], self.digests.get(name)
        if known is None or type(value) is not list:
            return digest(value)
        return list_digest([*known, *(digest(item) for item in value[len(known) :])])

    def add_output(self, output: OutputBase | HeldChoice) -> None:
        """Add an output's tokens, text and reasons for ending; its deltas are not applied."""
        self.token_ids.extend(output.token_ids)
        strings: list[str] | None = getattr(output, "token_strings", None)
        if strings is not None:
            if self.token_strings is None:
                self.token_strings = []
            self.token_strings.extend(strings)
        if output.text:
            self._text.append(output.text)
        message: MessageDelta | ChatMessage | None = getattr(output, "message", None)
        if isinstance(message, MessageDelta):
            self.message = extended(self.message, message)
        elif message is not None:
            self.message = message
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    def copy(self) -> ChoiceState:
        """A copy with containers of its own; arrays are shared, and read-only."""
        other = ChoiceState()
        other.values = _copy(self.values)
        other.records, other.record_digests = list(self.records), list(self.record_digests)
        other.column_names, other._layout = set(self.column_names), self._layout
        other._lists, other._made = _copy(self._lists), self._made
        other.digests = {name: list(known) for name, known in self.digests.items()}
        other.token_ids = list(self.token_ids)
        other.token_strings = None if self.token_strings is None else list(self.token_strings)
        other.finish_reason, other.stop_reason = self.finish_reason, self.stop_reason
        other.message = None if self.message is None else _copied(self.message)
        other._text = list(self._text)
        return other


def _copied(message: ChatMessage) -> ChatMessage:
    calls = [msgspec.structs.replace(call) for call in message.tool_calls]
    return msgspec.structs.replace(message, tool_calls=calls)


def extended(message: ChatMessage | None, delta: MessageDelta) -> ChatMessage:
    """`message`, or a new one, with the additions of a delta. The message is changed in place.

    Raises:
        FoldError: the delta adds to a tool call before those in front of it.
    """
    message = ChatMessage() if message is None else message
    if delta.content:
        message.content = (message.content or "") + delta.content
    if delta.reasoning:
        message.reasoning = (message.reasoning or "") + delta.reasoning
    for added in delta.tool_calls:
        if added.index == len(message.tool_calls):
            message.tool_calls.append(ToolCall(id=added.id or "", name=added.name or "", arguments=added.arguments))
            continue
        if not 0 <= added.index < len(message.tool_calls):
            raise FoldError(f"a message of {len(message.tool_calls)} tool calls got more of number {added.index}")
        call = message.tool_calls[added.index]
        call.id, call.name = call.id or added.id or "", call.name or added.name or ""
        call.arguments += added.arguments
    return message


def _copy(value: Any) -> Any:
    if type(value) not in _CONTAINERS:
        return value
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    if isinstance(value, set):
        return set(value)
    return value


class Fold:
    """The folded state of one trace.

    The caller must `apply` all events of the trace's stream, each once and in order. After a `FoldError` the caller
    must drop the fold. The fold copies the containers of the events that it applies. A caller must not change the
    fold's own containers: use `copy` or `state`.

    Args:
        names: the saved names to fold; `None` for all.
        verifying: take the digests of lists' items as they arrive, so that `verify` at the end is fast.
        contents: whether to fold tokens, text and saves. Without, the choices have the reasons for their ends alone.

    Attributes:
        attempt, seq: the id of the last event that was applied; 0 and -1 before the first.
        choices: the state of each choice by `(invoke, choice)`; that of the shared values by `(SHARED_INVOKE, 0)`.
        accepted: the event by which an engine accepted the current attempt; `None` before.
        live_version: the version of the live parameters as of the last event.
        paused: whether the trace is paused.
        status, error, usage, save_errors, manifest, prompt_logprobs, warnings: as in `Final`, when the trace has ended.
        lost: why saves of this attempt are out of reach, after which the fold takes no saves; `None` if it has all.
    """

    def __init__(self, names: Iterable[str] | None = None, *, verifying: bool = False, contents: bool = True) -> None:
        self.names = None if names is None else frozenset(names)
        self.verifying = verifying
        self.contents = contents
        self.attempt = 0
        self.seq = -1
        self.choices: dict[tuple[int, int], ChoiceState] = {}
        self.accepted: Accepted | None = None
        self.live_version = 0
        self.paused = False
        self.status: Status | None = None
        self.error: Failure | None = None
        self.usage = Usage()
        self.save_errors: dict[str, str] = {}
        self.manifest: list[Manifest] = []
        self.columns: list[ColumnsManifest] = []
        self.prompt_logprobs: list[list[dict[int, tuple[float, int | None, str | None]]]] = []
        self.warnings: list[str] = []
        self.lost: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the trace's final event was applied."""
        return self.status is not None

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, event: Event, lost: Exception | None = None) -> None:
        """Apply the next event. `lost` says why an output's saves are out of reach: it counts without them.

        The first event of a new attempt discards the state, unless that event is a `Final`: a trace that ends between
        two attempts keeps the state of the first.

        Raises:
            FoldError: the event is not the next one, or has a delta whose path leads nowhere.
        """
        try:
            self._apply(event, lost)
        except (Unsavable, RecursionError) as error:
            # The event holds a value that no engine sends: nested too deep, or with invalid keys.
            raise FoldError(f"event {event.attempt}-{event.seq} has a value that cannot be folded: {error}") from error

    def _apply(self, event: Event, lost: Exception | None) -> None:
        self._advance(event)
        if isinstance(event, OutputBase):
            if lost is not None and self.lost is None and self.contents and self.names != frozenset():
                self.lost = lost
            self._apply_output(event, lost)
        elif isinstance(event, Accepted):
            self.accepted = event
            self.live_version = event.live_version
        elif isinstance(event, SteeredBase):
            self.live_version = event.version
        elif isinstance(event, Paused | Resumed):
            self.paused = isinstance(event, Paused)
        elif isinstance(event, Final):
            self._apply_final(event)
        elif isinstance(event, Restarted):
            self._start_over()
        elif not isinstance(event, Notice):
            raise FoldError(f"a {type(event).__name__} cannot be folded")

    def _advance(self, event: Event) -> None:
        """Set `attempt` and `seq` to those of `event`; raises `FoldError` if `event` is not the next one."""
        if self.finished:
            raise FoldError(f"event {event.attempt}-{event.seq} comes after the final")
        newer = event.attempt > self.attempt
        if event.attempt < self.attempt or event.seq != (0 if newer else self.seq + 1):
            raise FoldError(f"event {event.attempt}-{event.seq} does not follow {self.attempt}-{self.seq}")
        if newer and not isinstance(event, Final):
            self._start_over()
        self.attempt, self.seq = event.attempt, event.seq

    def _start_over(self) -> None:
        self.choices = {}
        self.accepted = None
        self.live_version = 0
        self.paused = False
        self.lost = None

    def _apply_output(self, output: OutputBase, lost: Exception | None) -> None:
        if not self.contents and output.finish_reason is None:
            return
        state = self.choices.get((output.invoke, output.choice))
        if state is None:
            state = self.choices[output.invoke, output.choice] = ChoiceState()
        if not self.contents:
            state.finish_reason, state.stop_reason = output.finish_reason, output.stop_reason
            return
        deltas = output.deltas if lost is None and self.lost is None else []
        if output.index != len(state.token_ids):
            raise FoldError(
                f"{_describe(output)} begins at token {output.index}, and {len(state.token_ids)} came before it"
            )
        if deltas and len(deltas) != len(output.token_ids) and output.invoke != SHARED_INVOKE:
            raise FoldError(f"{_describe(output)} has deltas of {len(deltas)} steps for {len(output.token_ids)} tokens")
        state.add_output(output)
        for step in deltas:
            self._apply_deltas(state, step)

    def _apply_final(self, final: Final) -> None:
        if self.contents:
            for invoke, choice, deltas in final.deltas:
                self._apply_deltas(self.choices.setdefault((invoke, choice), ChoiceState()), deltas)
            for invoke, choice, message in final.messages:
                self.choices.setdefault((invoke, choice), ChoiceState()).message = message
        self.status = final.status
        self.error = final.error
        self.usage = final.usage
        self.save_errors = dict(final.save_errors)
        self.manifest = list(final.manifest)
        self.columns = list(final.columns)
        self.prompt_logprobs = list(final.prompt_logprobs)
        self.warnings = list(final.warnings)

    def _apply_deltas(self, state: ChoiceState, deltas: Iterable[Delta]) -> None:
        if self.lost is not None:
            # Changes build on those before them.
            return
        for delta in deltas:
            if isinstance(delta, Columns):
                state.add_record(delta, self.names)
                continue
            if not delta.path:
                raise FoldError(f"{type(delta).__name__} without a path")
            if self.names is None or delta.path[0] in self.names:
                if delta.path[0] in state.column_names:
                    kind = type(delta).__name__
                    raise FoldError(f"{kind} at {delta.path!r}: this name's items travel in records of columns")
                apply_delta(state.values, delta)
                if self.verifying:
                    state.update_digests(delta)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state as a message, from which another fold can `resume`.

        The snapshot shares containers with this fold: encode it before the next `apply`. Only a fold of events that
        `decode_plain` decoded has a snapshot that can be encoded.

        Raises:
            FoldError: the trace has ended, or this fold is limited to some names.
        """
        if self.finished or self.names is not None:
            raise FoldError("only a fold of all saves of a running trace has a snapshot")
        return Snapshot(
            attempt=self.attempt,
            seq=self.seq,
            choices=[
                HeldChoice(
                    *(invoke, choice, held.token_ids, held.text, held.finish_reason, held.stop_reason, held.values),
                    token_strings=held.token_strings,
                    columns=[Columns(layout, values) for layout, values in held.records],
                    message=held.message,
                )
                for (invoke, choice), held in self.choices.items()
            ],
            accepted=self.accepted,
            live_version=self.live_version,
            paused=self.paused,
        )

    def resume(self, snapshot: Snapshot) -> None:
        """Replace the state by that of a snapshot; the next event to apply is the one after it.

        The fold takes over the snapshot's containers. A wrong snapshot is found in the end: `verify` compares the
        digests of its values with the manifest, too.

        Raises:
            FoldError: the trace has ended, or the snapshot is not newer than the last event that was applied.
        """
        if self.finished or (snapshot.attempt, snapshot.seq) <= (self.attempt, self.seq):
            raise FoldError(f"a snapshot at {snapshot.attempt}-{snapshot.seq} is behind {self.attempt}-{self.seq}")
        self._start_over()
        self.attempt, self.seq = snapshot.attempt, snapshot.seq
        for held in snapshot.choices:
            state = self.choices[held.invoke, held.choice] = ChoiceState()
            if not self.contents:
                state.finish_reason, state.stop_reason = held.finish_reason, held.stop_reason
                continue
            state.add_output(held)
            state.values = {
                name: value for name, value in held.saves.items() if self.names is None or name in self.names
            }
            for record in held.columns:
                state.add_record(record, self.names)
        self.accepted = snapshot.accepted
        self.live_version = snapshot.live_version
        self.paused = snapshot.paused

    # --- the saves ----------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Compare the digests of the folded saves with the manifest of the trace's `Final`.

        If the trace was rejected or its engine was lost, the `Final` has no manifest, and nothing is compared. Nor is
        anything without `contents`, or if saves are `lost`.

        Raises:
            DigestMismatch: a save differs, is missing, or is not in the manifest.
            FoldError: the trace has not ended yet.
        """
        if not self.finished:
            raise FoldError("only a finished trace can be verified")
        if not self.contents or self.lost is not None:
            return
        if not self.manifest and self.status not in ("finished", "stopped"):
            return
        wanted = {
            (entry.invoke, entry.choice, entry.name): entry.digest
            for entry in self.manifest
            if self.names is None or entry.name in self.names
        }
        held = {
            (invoke, choice, name): state.digest_of(name)
            for (invoke, choice), state in self.choices.items()
            for name in state.values
        }
        held |= {
            (invoke, choice, name): b""
            for (invoke, choice), state in self.choices.items()
            for name in state.column_names
        }
        wrong = {key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key)}
        wrong -= {key for key in wrong & wanted.keys() & held.keys() if self._former(key) == wanted[key]}
        wrong |= self._wrong_columns({key for key, digest in wanted.items() if not digest})
        if wrong:
            raise DigestMismatch([f"{invoke}.{choice}.{name}" for invoke, choice, name in sorted(wrong)])

    def _former(self, key: tuple[int, int, str]) -> bytes:
        """The digest of a save as engines before schema 2.0 took it."""
        invoke, choice, name = key
        values = self.choices[invoke, choice].values
        return former_digest(values[name]) if name in values else b""

    def _wrong_columns(self, names: set[tuple[int, int, str]]) -> set[tuple[int, int, str]]:
        """The names among these saves, which came by columns, whose records differ from the engine's."""
        sent = {(entry.invoke, entry.choice): entry for entry in self.columns}
        wrong = set()
        for invoke, choice in {key[:2] for key in names}:
            entry, state = sent.get((invoke, choice)), self.choices.get((invoke, choice))
            found = state.record_digests if state is not None else []
            if entry is None or len(found) != entry.records or list_digest(found) != entry.digest:
                wrong |= {key for key in names if key[:2] == (invoke, choice)}
        return wrong

    def digest(self, names: Iterable[str] | None = None) -> bytes:
        """The 16-byte digest of the saves of all choices, limited to `names` if given."""
        chosen = None if names is None else frozenset(names)
        saves = {
            f"{invoke}.{choice}": {
                name: value for name, value in state.saves.items() if chosen is None or name in chosen
            }
            for (invoke, choice), state in self.choices.items()
        }
        return digest({key: value for key, value in saves.items() if value})

    def state(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The saves by `(invoke, choice)` and name, in copied containers; arrays are shared, and read-only."""
        return {key: _copy(state.saves) for key, state in self.choices.items()}

    def copy(self) -> Fold:
        """An independent fold of the same state; arrays are shared, and read-only."""
        other = Fold(self.names)
        other.__dict__.update(self.__dict__)
        other.choices = {key: state.copy() for key, state in self.choices.items()}
        other.save_errors, other.manifest = dict(self.save_errors), list(self.manifest)
        return other


def _describe(output: OutputBase) -> str:
    return f"output {output.attempt}-{output.seq} of invoke {output.invoke}, choice {output.choice},"


def apply_delta(saves: dict[str, Any], delta: Delta) -> None:
    """Apply one delta, other than `Columns`, to the saves of one choice. Containers that it brings are copied.

    Raises:
        FoldError: its path leads nowhere, or not to what its operation takes; or it is a record of columns.
    """
    if isinstance(delta, Columns):
        raise FoldError("a record of columns where none is expected")
    target: Any = saves
    try:
        *parents, last = delta.path
        for key in parents:
            target = _item(target, key)
        if isinstance(delta, Append):
            target = _item(target, last)
            if type(target) is not list:
                raise TypeError(f"a {type(target).__name__} is no list")
            target.extend([_copy(item) for item in delta.items])
        elif isinstance(delta, Set):
            if type(target) is not dict:
                _item(target, last)
            target[last] = _copy(delta.value)
        else:
            if type(target) is not dict:
                raise TypeError(f"a {type(target).__name__} is no dict")
            del target[last]
    except (KeyError, IndexError, TypeError) as error:
        # `decode_plain` leaves a key that is a tuple encoded. An `Ext` is not hashable, so nothing has changed yet.
        if Ext in map(type, delta.path):
            apply_delta(saves, msgspec.structs.replace(delta, path=_decoded_path(delta)))
            return
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: {error!r}") from error


def _decoded_path(delta: Append | Set | Delete) -> tuple[Any, ...]:
    try:
        path = tuple(map(decode_key, delta.path))
    except ValueError as error:
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: {error}") from error
    if Ext in map(type, path):
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: a step of it cannot be a key")
    return path


def _item(container: Any, key: Any) -> Any:
    """An item of a list or dict. Deltas replace arrays, texts and tuples only as a whole.

    Raises:
        IndexError, KeyError: the container has no such item.
        TypeError: `container` is neither a list nor a dict.
    """
    if type(container) is dict:
        return container[key]
    if type(container) is list:
        if type(key) is int and 0 <= key < len(container):
            return container[key]
        raise IndexError(f"index {key!r} of a list of {len(container)}")
    raise TypeError(f"a {type(container).__name__} is neither list nor dict")
