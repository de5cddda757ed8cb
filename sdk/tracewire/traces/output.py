"""Events of a trace as a consumer gets them.

They are the messages of the bus with convenient properties. An `Output` decodes its saves when the consumer first asks
for them, so that reading the text alone decodes no array.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from tracewire.errors import ClientTooOld, MalformedEvent, ValueMissing
from tracewire_bus.bus import Gap as EntryGap
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.codec import NewerSchema, check_schema, decode_deltas, decode_snapshot
from tracewire_bus.wire.columns import layout_of
from tracewire_bus.wire.kinds import MAX_DEPTH
from tracewire_bus.wire.messages import (
    Accepted,
    Append,
    Change,
    Columns,
    Delete,
    Delta,
    Final,
    Lagging,
    MessageDelta,
    Notice,
    OutputBase,
    Paused,
    Restarted,
    Resumed,
    Set,
    Steered,
    Waiting,
)

from .state import State
from .values import Values

if TYPE_CHECKING:
    from tracewire_bus.wire.messages import Snapshot

__all__ = [
    "Accepted",
    "AnyEvent",
    "Change",
    "Event",
    "Final",
    "Gap",
    "Item",
    "Lagging",
    "Output",
    "Paused",
    "Restarted",
    "Resumed",
    "Shared",
    "Steered",
    "Waiting",
    "merged",
    "only",
]


#: So many bytes have the deltas of one step without any. A delta takes more.
_EMPTY_BYTES = 2


class Saving(OutputBase, dict=True):
    """Base of `Output` and `Shared`: the saves of an event, decoded when the consumer first asks for them."""

    #: `deltas` as they arrived, of all names.
    encoded_deltas: msgspec.Raw = msgspec.Raw(b"\x90")
    token_strings: list[str] | None = None

    @property
    def deltas(self) -> list[list[Delta]]:
        """The changes of the saves, a list for each step: `Append`, `Set` and `Delete` of one path each, and `Columns`.

        A `Columns` is the record of all reads of declared interventions in the step. `delta` has the values of all.

        Raises:
            MalformedEvent: the saves cannot be read.
            ValueMissing: the saves are in a bulk store that cannot be read.
        """
        held: list[list[Delta]] | None = self.__dict__.get("_deltas")
        if held is None:
            held = self.__dict__["_deltas"] = self._decoded()
        return held

    def lose_saves(self, error: ValueMissing) -> None:
        """Have `deltas` and `delta` raise this error: the event's saves are lost or out of reach."""
        self.__dict__["_missing"] = error

    @property
    def lost(self) -> ValueMissing | None:
        """The error that `deltas` and `delta` raise, if the event's saves are lost or out of reach."""
        missing: ValueMissing | None = self.__dict__.get("_missing")
        return missing

    def _decoded(self) -> list[list[Delta]]:
        names: frozenset[str] | None = self.__dict__.get("_names")
        if names is not None and not names:
            return [[] for _ in self.token_ids]
        if (missing := self.__dict__.get("_missing")) is not None:
            raise missing
        try:
            deltas = decode_deltas(self.encoded_deltas, self.__dict__.get("_loader"))
        except msgspec.MsgspecError as error:
            raise MalformedEvent(f"the saves of event {self.id} cannot be read: {error}") from error
        if names is None:
            return deltas
        # Records of columns are digested as a whole: they are kept whole, and `delta` takes the wanted names from them.
        return [[change for change in step if is_of(change, names)] for step in deltas]

    def only(self, names: frozenset[str]) -> Self:
        """A copy of this event with the saves of these names only."""
        copy = msgspec.structs.replace(self)
        copy.__dict__.update(_names=names, _loader=self.__dict__.get("_loader"), _missing=self.__dict__.get("_missing"))
        return copy

    @property
    def delta(self) -> Values:
        """The event's additions to the saves, by saved name: new items of a list, new keys of a dict, or a new value.

        A list that grew by one item appears as a list of that item, a dict that gained a key as a dict of that key, and
        nested containers likewise. Other changes (a replaced item of a list, a deleted key) are in `deltas` only. The
        dict has the same conversions as `result.saves`.

        Raises:
            MalformedEvent: the saves cannot be read.
            ValueMissing: the saves are in a bulk store that cannot be read.
        """
        if memoryview(self.encoded_deltas).nbytes <= _EMPTY_BYTES and "_missing" not in self.__dict__:
            return Values()
        return merged(self.deltas, self.__dict__.get("_names"))


def merged(steps: Iterable[list[Delta]], names: frozenset[str] | None = None) -> Values:
    """The additions of these steps to the saves, by saved name, as `Output.delta` has them. `names` limits them.

    Raises:
        MalformedEvent: the saves nest deeper than an engine sends them.
    """
    values = Values()
    for step in steps:
        for change in step:
            if isinstance(change, Columns):
                for name, item in layout_of(change.layout).items(change.values, names):
                    values.setdefault(name, []).append(item)
            else:
                _merge(values, change)
    return values


class Output(Saving, tag="o", dict=True):
    """The additions of one vLLM output to one choice: usually one token, its text, and new saves of the block.

    `token_ids[k]` has index `index + k` in its choice, and `deltas[k]` has the saves of the step that sampled it.

    Attributes:
        id: the event's id, `<attempt>-<seq>`. `subscribe(trace, since=output.id)` goes on after it.
        invoke, choice: which of the trace's prompts, and which of its `n` sampled sequences; both from 0.
        text: the text of the tokens.
        time: when the step of the last of them ended, in seconds since the epoch by the engine's clock.
        finish_reason, stop_reason: vLLM's words for why the choice ended, when this is its last output.
        token_strings: if requested, the string of each token, with its leading space. Where a character spans several
            tokens, each of them has the replacement character.
        logprobs: if requested, a dict for each token, from token id to `(logprob, rank, text)`.
        message: of a chat, what the output adds to the choice's message: content, reasoning, tool calls; or None.
    """

    type: ClassVar[Literal["output"]] = "output"
    message: MessageDelta | None = None

    def __repr__(self) -> str:
        size = memoryview(self.encoded_deltas).nbytes
        where = f"invoke {self.invoke}, choice {self.choice}, from token {self.index}"
        return f"<Output {self.id} of {where}: {self.token_ids}, {self.text!r}, saves of {size} bytes>"


class Shared(Saving, tag="x", dict=True):
    """The additions to the trace's shared values, in one step or several. It has no tokens and no text.

    Shared values belong to all prompts together, so the event belongs to no prompt: `invoke` is -1.
    """

    type: ClassVar[Literal["shared"]] = "shared"

    def __repr__(self) -> str:
        size = memoryview(self.encoded_deltas).nbytes
        return f"<Shared {self.id}: shared values gained {size} bytes>"


class Gap:
    """Events that were trimmed before they were read: those after `since` up to and with the one of id `until`.

    `since` is an event's id, or `"start"` for all from the first. An engine with a limit on its streams (`tracewire
    engine --retain-events`, `--retain-bytes`) trims them. `state` has their tokens, text and saves, folded, and the
    following events continue it.
    """

    type: ClassVar[Literal["gap"]] = "gap"

    __slots__ = ("_data", "_loader", "_names", "_schema", "since", "trace_id", "until")

    def __init__(self, trace_id: str, gap: EntryGap, loader: Any, names: frozenset[str] | None = None) -> None:
        self.trace_id = trace_id
        self.since = gap.since
        self.until = gap.until
        self._schema, self._data = gap.snapshot.schema, gap.snapshot.data
        self._loader = loader
        self._names = names

    @property
    def id(self) -> str:
        """Id of the last trimmed event. `subscribe(trace, since=gap.id)` goes on after it."""
        return self.until

    @property
    def state(self) -> State:
        """The trace's state up to `until`. Each access makes a new one.

        Raises:
            MalformedEvent: the snapshot cannot be read.
        """
        fold = Fold(self._names)
        fold.resume(self.snapshot())
        return State(self.trace_id, fold)

    def snapshot(self) -> Snapshot:
        """The snapshot from which a fold goes on.

        Raises:
            MalformedEvent: it cannot be read.
            ClientTooOld: it is of a newer schema than this client reads.
        """
        try:
            check_schema(self._schema)
            return decode_snapshot(self._data, loader=self._loader)
        except NewerSchema as error:
            raise ClientTooOld(f"trace {self.trace_id}, the snapshot at {self.until}: {error}") from error
        except msgspec.MsgspecError as error:
            raise MalformedEvent(f"trace {self.trace_id}, the snapshot at {self.until}: {error}") from error

    def only(self, names: frozenset[str]) -> Gap:
        """This gap with only these saved names in its state."""
        copy = Gap.__new__(Gap)
        for slot in Gap.__slots__:
            setattr(copy, slot, getattr(self, slot))
        copy._names = names
        return copy

    def __repr__(self) -> str:
        return f"<Gap in {self.trace_id}: the events after {self.since} up to {self.until} were trimmed>"


AnyEvent: TypeAlias = Accepted | Output | Shared | Notice | Final
"""An event on a trace's stream."""
Event: TypeAlias = AnyEvent | Gap
"""An event as `subscribe` yields it: one on the trace's stream, or a `Gap` in place of trimmed ones.

`event.type` tells them apart: `"accepted"`, `"output"`, `"shared"`, `"steered"`, `"paused"`, `"resumed"`, `"lagging"`,
`"waiting"`, `"restarted"`, `"gap"` and `"final"`."""
Item: TypeAlias = Output | Shared | Notice | Gap
"""An item that iterating over a trace yields: any event but its `Accepted` and its `Final`."""


def _merge(merged: dict[str, Any], change: Append | Set | Delete) -> None:
    *way, last = change.path
    depth = len(change.path)
    target: Any = merged
    for key in way:
        if isinstance(target, list):
            # A change inside a list's item: the event does not have the list's other items.
            return
        target = target.setdefault(key, {})
    if not isinstance(target, dict):
        return
    if isinstance(change, Append):
        if not isinstance(target.get(last), list):
            target[last] = []
        target[last].extend(_own(item, depth + 1) for item in change.items)
    elif isinstance(change, Set):
        target[last] = _own(change.value, depth)
    else:
        target.pop(last, None)


def _own(value: Any, depth: int) -> Any:
    """`value` with containers of its own, so that merging never changes the event. `depth` is that of its place."""
    if isinstance(value, list | dict | tuple) and depth > MAX_DEPTH:
        raise MalformedEvent(f"the saves of an event nest deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_own(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: _own(item, depth + 1) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_own(item, depth + 1) for item in value)
    if isinstance(value, set):
        return set(value)
    return value


def is_of(change: Delta, names: frozenset[str]) -> bool:
    """Whether a delta concerns any of these saved names, or may."""
    return isinstance(change, Columns) or change.path[0] in names


def only(event: Event, names: frozenset[str]) -> Event:
    """`event` with the saves of these names only."""
    if isinstance(event, Output | Shared | Gap):
        return event.only(names)
    if isinstance(event, Final):
        return msgspec.structs.replace(
            event,
            deltas=[
                (invoke, choice, [change for change in deltas if is_of(change, names)])
                for invoke, choice, deltas in event.deltas
            ],
            manifest=[entry for entry in event.manifest if entry.name in names],
            save_errors={
                where: reason for where, reason in event.save_errors.items() if where.split(".", 2)[-1] in names
            },
        )
    return event
