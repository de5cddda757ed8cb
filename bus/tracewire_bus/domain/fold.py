"""The state of a trace: all its events folded, in order.

Folding is what every consumer does, the SDK's own included. A `Fold` takes events one by
one, refuses gaps and repeats, and in the end compares what it holds with the digests that the engine published: a
consumer that verified has exactly what nnsight collected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from tracewire_bus.wire.digests import digest, list_digest
from tracewire_bus.wire.kinds import Unsavable, opened_key
from tracewire_bus.wire.messages import (
    SHARED_INVOKE,
    Accepted,
    Append,
    Delta,
    Event,
    Failure,
    Final,
    HeldChoice,
    Manifest,
    Notice,
    OutputBase,
    Paused,
    Restarted,
    Resumed,
    Set,
    Snapshot,
    Status,
    SteeredBase,
    Usage,
)

__all__ = ["ChoiceState", "DigestMismatch", "Fold", "FoldError", "apply_delta"]

_CONTAINERS = frozenset({list, dict, tuple, set})


class FoldError(ValueError):
    """An event that does not follow from the state: a gap, a repeat, or a path that leads nowhere."""


class DigestMismatch(ValueError):
    """The folded saves are not what the engine says they are. `names` lists them as `invoke.choice.name`."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"folded saves differ from the engine's: {', '.join(names)}")
        self.names = names


class ChoiceState:
    """What one choice of one invoke has put out and saved so far."""

    def __init__(self) -> None:
        self.saves: dict[str, Any] = {}
        #: Of the first items of saved lists, where they are taken as they come.
        self.digests: dict[str, list[bytes]] = {}
        self.token_ids: list[int] = []
        #: The tokens' strings, where the engine sends them.
        self.token_strings: list[str] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    def changed(self, delta: Delta) -> None:
        """Keep `digests` up with a delta that was applied: those of the items of lists, as far as they are settled."""
        name = delta.path[0]
        if len(delta.path) > 1:
            # Somewhere inside: what comes from there on is digested in the end.
            place = delta.path[1]
            known = self.digests.get(name)
            if known is not None:
                del known[place if type(place) is int else 0 :]
        elif isinstance(delta, Append):
            known, held = self.digests.setdefault(name, []), self.saves[name]
            if len(known) + len(delta.items) == len(held):
                known.extend(digest(item) for item in delta.items)
        else:
            self.digests.pop(name, None)
            value = self.saves.get(name)
            if type(value) is list:
                self.digests[name] = [digest(item) for item in value]

    def digest_of(self, name: str) -> bytes:
        """The digest of a save."""
        value, known = self.saves[name], self.digests.get(name)
        if known is None or type(value) is not list:
            return digest(value)
        return list_digest([*known, *(digest(item) for item in value[len(known) :])])

    def put_out(self, output: OutputBase | HeldChoice) -> None:
        """Add what an output brings but for its saves."""
        self.token_ids.extend(output.token_ids)
        strings: list[str] | None = getattr(output, "token_strings", None)
        if strings is not None:
            if self.token_strings is None:
                self.token_strings = []
            self.token_strings.extend(strings)
        if output.text:
            self._text.append(output.text)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    def copy(self) -> ChoiceState:
        """A copy whose containers are its own; arrays are shared, and read-only."""
        other = ChoiceState()
        other.saves = _copy(self.saves)
        other.digests = {name: list(known) for name, known in self.digests.items()}
        other.token_ids = list(self.token_ids)
        other.token_strings = None if self.token_strings is None else list(self.token_strings)
        other.finish_reason, other.stop_reason = self.finish_reason, self.stop_reason
        other._text = list(self._text)
        return other


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

    `names` limits which saved names are folded. `choices` maps `(invoke, choice)` to its state; what the trace shares
    is that of `(SHARED_INVOKE, 0)`. Events must come from a stream's beginning, each once and in order; after a
    `FoldError` the fold is good for nothing. With `verifying`, digests of lists' items are taken as they come, so that
    `verify` has little left to do.

    Its containers are its own: an event that was applied may be changed, and the fold's are not to be. To hand them
    out, `copy` it or take its `state`.
    """

    def __init__(self, names: Iterable[str] | None = None, *, verifying: bool = False) -> None:
        self.names = None if names is None else frozenset(names)
        self.verifying = verifying
        self.attempt = 0
        self.seq = -1
        self.choices: dict[tuple[int, int], ChoiceState] = {}
        self.accepted: Accepted | None = None
        #: Version of the live parameters that the events so far tell of.
        self.live_version = 0
        self.paused = False
        self.status: Status | None = None
        self.error: Failure | None = None
        self.usage = Usage()
        self.save_errors: dict[str, str] = {}
        self.manifest: list[Manifest] = []
        self.prompt_logprobs: list[list[dict[int, tuple[float, int | None, str | None]]]] = []
        self.warnings: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether the final has been folded."""
        return self.status is not None

    # --- events -------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Fold the next event.

        The first event of a new attempt starts the fold over, unless it is the final: then what came before stands.

        Raises:
            FoldError: it does not follow what was folded before, or has a delta that leads nowhere.
        """
        try:
            self._apply(event)
        except (Unsavable, RecursionError) as error:
            # What it holds is no value of anybody's: nested too deep, or with keys that find nothing.
            raise FoldError(f"event {event.attempt}-{event.seq} holds what cannot be folded: {error}") from error

    def _apply(self, event: Event) -> None:
        self._follow(event)
        if isinstance(event, OutputBase):
            self._output(event)
        elif isinstance(event, Accepted):
            self.accepted = event
            self.live_version = event.live_version
        elif isinstance(event, SteeredBase):
            self.live_version = event.version
        elif isinstance(event, Paused | Resumed):
            self.paused = isinstance(event, Paused)
        elif isinstance(event, Final):
            self._final(event)
        elif isinstance(event, Restarted):
            self._start_over()
        elif not isinstance(event, Notice):
            raise FoldError(f"a {type(event).__name__} cannot be folded")

    def _follow(self, event: Event) -> None:
        """Count the event, if it is the next one."""
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

    def _output(self, output: OutputBase) -> None:
        state = self.choices.get((output.invoke, output.choice))
        if state is None:
            state = self.choices[output.invoke, output.choice] = ChoiceState()
        deltas = output.deltas
        if output.index != len(state.token_ids):
            raise FoldError(
                f"{_where(output)} begins at token {output.index}, and {len(state.token_ids)} came before it"
            )
        if deltas and len(deltas) != len(output.token_ids) and output.invoke != SHARED_INVOKE:
            raise FoldError(f"{_where(output)} has deltas of {len(deltas)} steps for {len(output.token_ids)} tokens")
        state.put_out(output)
        for step in deltas:
            self._deltas(state, step)

    def _final(self, final: Final) -> None:
        for invoke, choice, deltas in final.deltas:
            self._deltas(self.choices.setdefault((invoke, choice), ChoiceState()), deltas)
        self.status = final.status
        self.error = final.error
        self.usage = final.usage
        self.save_errors = dict(final.save_errors)
        self.manifest = list(final.manifest)
        self.prompt_logprobs = list(final.prompt_logprobs)
        self.warnings = list(final.warnings)

    def _deltas(self, state: ChoiceState, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if not delta.path:
                raise FoldError(f"{type(delta).__name__} without a path")
            if self.names is None or delta.path[0] in self.names:
                apply_delta(state.saves, delta)
                if self.verifying:
                    state.changed(delta)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What a fold goes on from that `resume` has brought here. Shares containers with this one: encode it at once.

        It can be encoded if what was folded was decoded by `decode_plain`.

        Raises:
            FoldError: the final was folded, or `names` leaves something out.
        """
        if self.finished or self.names is not None:
            raise FoldError("a snapshot is one of all that a running trace holds")
        return Snapshot(
            attempt=self.attempt,
            seq=self.seq,
            choices=[
                HeldChoice(
                    *(invoke, choice, held.token_ids, held.text, held.finish_reason, held.stop_reason, held.saves),
                    token_strings=held.token_strings,
                )
                for (invoke, choice), held in self.choices.items()
            ],
            accepted=self.accepted,
            live_version=self.live_version,
            paused=self.paused,
        )

    def resume(self, snapshot: Snapshot) -> None:
        """Hold what the snapshot does, in place of what was folded: the next event is the one after it.

        Takes the snapshot's containers for its own. What it says is not trusted: `verify` takes the digests of the
        values themselves.

        Raises:
            FoldError: the snapshot is of an event that was folded, or comes before one.
        """
        if self.finished or (snapshot.attempt, snapshot.seq) <= (self.attempt, self.seq):
            raise FoldError(f"a snapshot at {snapshot.attempt}-{snapshot.seq} is behind {self.attempt}-{self.seq}")
        self._start_over()
        self.attempt, self.seq = snapshot.attempt, snapshot.seq
        for held in snapshot.choices:
            state = self.choices[held.invoke, held.choice] = ChoiceState()
            state.put_out(held)
            state.saves = {
                name: value for name, value in held.saves.items() if self.names is None or name in self.names
            }
        self.accepted = snapshot.accepted
        self.live_version = snapshot.live_version
        self.paused = snapshot.paused

    # --- what it holds ------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Compare what was folded with the final's manifest.

        A trace that ended without its engine's last word (rejected, or lost) has no manifest; nothing is compared then.

        Raises:
            DigestMismatch: something differs, is missing, or should not be there.
            FoldError: the final has not been folded yet.
        """
        if not self.finished:
            raise FoldError("only a finished trace can be verified")
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
            for name in state.saves
        }
        wrong = sorted(key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key))
        if wrong:
            raise DigestMismatch([f"{invoke}.{choice}.{name}" for invoke, choice, name in wrong])

    def digest(self, names: Iterable[str] | None = None) -> bytes:
        """16 bytes that are equal for equal saves of all choices, whoever folded them; of `names` only, if given."""
        chosen = None if names is None else frozenset(names)
        saves = {
            f"{invoke}.{choice}": {
                name: value for name, value in state.saves.items() if chosen is None or name in chosen
            }
            for (invoke, choice), state in self.choices.items()
        }
        return digest({key: value for key, value in saves.items() if value})

    def state(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The saves by `(invoke, choice)`, in containers of the caller's own; arrays are shared, and read-only."""
        return {key: _copy(state.saves) for key, state in self.choices.items()}

    def copy(self) -> Fold:
        """A fold that goes on from here by itself; arrays are shared, and read-only."""
        other = Fold(self.names)
        other.__dict__.update(self.__dict__)
        other.choices = {key: state.copy() for key, state in self.choices.items()}
        other.save_errors, other.manifest = dict(self.save_errors), list(self.manifest)
        return other


def _where(output: OutputBase) -> str:
    return f"output {output.attempt}-{output.seq} of invoke {output.invoke}, choice {output.choice},"


def apply_delta(saves: dict[str, Any], delta: Delta) -> None:
    """Apply one delta to the saves of one choice. Containers that it brings are copied.

    Raises:
        FoldError: its path leads nowhere, or not to what its operation takes.
    """
    target: Any = saves
    try:
        *way, last = delta.path
        for key in way:
            target = _at(target, key)
        if isinstance(delta, Append):
            target = _at(target, last)
            if type(target) is not list:
                raise TypeError(f"a {type(target).__name__} is no list")
            target.extend([_copy(item) for item in delta.items])
        elif isinstance(delta, Set):
            if type(target) is not dict:
                _at(target, last)
            target[last] = _copy(delta.value)
        else:
            if type(target) is not dict:
                raise TypeError(f"a {type(target).__name__} is no dict")
            del target[last]
    except (KeyError, IndexError, TypeError) as error:
        # Keys that are tuples stand encoded in what was decoded plain. No dict takes them so: nothing has changed yet.
        if Ext in map(type, delta.path):
            apply_delta(saves, msgspec.structs.replace(delta, path=_opened(delta)))
            return
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: {error!r}") from error


def _opened(delta: Delta) -> tuple[Any, ...]:
    try:
        path = tuple(map(opened_key, delta.path))
    except ValueError as error:
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: {error}") from error
    if Ext in map(type, path):
        raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: a step of it is no key")
    return path


def _at(container: Any, key: Any) -> Any:
    """An item of a list or dict. Not of an array, a text or a tuple, which are values as a whole."""
    if type(container) is dict:
        return container[key]
    if type(container) is list:
        if type(key) is int and 0 <= key < len(container):
            return container[key]
        raise IndexError(f"index {key!r} of a list of {len(container)}")
    raise TypeError(f"a {type(container).__name__} is neither list nor dict")
