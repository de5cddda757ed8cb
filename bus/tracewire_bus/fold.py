"""The state of a trace: all its events folded, in order.

Folding is what every consumer does, the SDK's own included. A [`Fold`][tracewire_bus.fold.Fold] takes events one by
one, refuses gaps and repeats, and in the end compares what it holds with the digests that the engine published: a
consumer that verified has exactly what nnsight collected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .messages import (
    Accepted,
    Append,
    Delete,
    Delta,
    Event,
    Failure,
    Final,
    Manifest,
    Output,
    Restarted,
    Set,
    Status,
    Usage,
)
from .values import digest

__all__ = ["ChoiceState", "DigestMismatch", "Fold", "FoldError"]


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
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def copy(self) -> ChoiceState:
        """A copy whose containers are its own; arrays are shared, and read-only."""
        other = ChoiceState()
        other.saves = _copy(self.saves)
        other.token_ids = list(self.token_ids)
        other.text = self.text
        other.finish_reason, other.stop_reason = self.finish_reason, self.stop_reason
        return other


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    return value


class Fold:
    """The folded state of one trace.

    `names` limits which saved names are folded. `choices` maps `(invoke, choice)` to its state. Events must come from a
    stream's beginning, each once and in order.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.names = None if names is None else frozenset(names)
        self.attempt = 0
        self._reset()

    def _reset(self) -> None:
        self.seq = -1
        self.choices: dict[tuple[int, int], ChoiceState] = {}
        self.accepted: Accepted | None = None
        self.status: Status | None = None
        self.error: Failure | None = None
        self.usage = Usage()
        self.save_errors: dict[str, str] = {}
        self.manifest: list[Manifest] = []

    @property
    def finished(self) -> bool:
        """Whether the final has been folded."""
        return self.status is not None

    def apply(self, event: Event) -> None:
        """Fold the next event.

        Raises:
            FoldError: it does not follow what was folded before.
        """
        if self.finished:
            raise FoldError(f"event {event.attempt}-{event.seq} comes after the final")
        if event.attempt != self.attempt:
            if event.attempt < self.attempt or event.seq != 0:
                raise FoldError(f"event {event.attempt}-{event.seq} does not follow {self.attempt}-{self.seq}")
            # A new attempt starts from nothing, announced by its first event.
            self._reset()
            self.attempt = event.attempt
        if event.seq != self.seq + 1:
            raise FoldError(f"event {event.attempt}-{event.seq} does not follow {self.attempt}-{self.seq}")
        self.seq = event.seq
        if isinstance(event, Output):
            self._output(event)
        elif isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Final):
            self._final(event)
        elif not isinstance(event, Restarted):
            raise FoldError(f"a {type(event).__name__} cannot be folded")

    def _output(self, output: Output) -> None:
        state = self.choices.setdefault((output.invoke, output.choice), ChoiceState())
        if output.index != len(state.token_ids):
            raise FoldError(
                f"output {output.attempt}-{output.seq} begins at token {output.index} of invoke {output.invoke}, "
                f"choice {output.choice}, which has {len(state.token_ids)}"
            )
        state.token_ids.extend(output.token_ids)
        state.text += output.text
        if output.finish_reason is not None:
            state.finish_reason, state.stop_reason = output.finish_reason, output.stop_reason
        for deltas in output.deltas:
            for delta in deltas:
                self._delta(state, delta)

    def _final(self, final: Final) -> None:
        for invoke, choice, deltas in final.deltas:
            state = self.choices.setdefault((invoke, choice), ChoiceState())
            for delta in deltas:
                self._delta(state, delta)
        self.status = final.status
        self.error = final.error
        self.usage = final.usage
        self.save_errors = final.save_errors
        self.manifest = final.manifest

    def _delta(self, state: ChoiceState, delta: Delta) -> None:
        if self.names is not None and delta.path[0] not in self.names:
            return
        *way, last = delta.path
        target: Any = state.saves
        try:
            for key in way:
                target = target[key]
            if isinstance(delta, Append):
                target = target[last]
                if not isinstance(target, list):
                    raise TypeError(f"a {type(target).__name__} is no list")
                # The message's own items: containers among them become the fold's.
                target.extend(_copy(item) for item in delta.items)
            elif isinstance(delta, Set):
                if isinstance(target, list) and not 0 <= last < len(target):
                    raise IndexError(f"index {last} of a list of {len(target)}")
                target[last] = _copy(delta.value)
            elif isinstance(delta, Delete):
                del target[last]
        except (KeyError, IndexError, TypeError) as error:
            raise FoldError(f"{type(delta).__name__} at {delta.path!r} leads nowhere: {error!r}") from error

    def verify(self) -> None:
        """Compare what was folded with the final's manifest.

        Raises:
            DigestMismatch: something differs, is missing, or should not be there.
            FoldError: the final has not been folded yet.
        """
        if not self.finished:
            raise FoldError("only a finished trace can be verified")
        wanted = {(entry.invoke, entry.choice, entry.name): entry.digest for entry in self.manifest}
        if self.names is not None:
            wanted = {key: value for key, value in wanted.items() if key[2] in self.names}
        held = {
            (invoke, choice, name): digest(value)
            for (invoke, choice), state in self.choices.items()
            for name, value in state.saves.items()
        }
        if not self.manifest and self.status in ("rejected", "failed", "cancelled", "expired"):
            # Ended without the engine's last word: there is nothing to compare with.
            return
        wrong = sorted(key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key))
        if wrong:
            raise DigestMismatch([f"{invoke}.{choice}.{name}" for invoke, choice, name in wrong])

    def digest(self) -> bytes:
        """16 bytes that are equal for equal saves of all choices, whoever folded them."""
        return digest(
            {f"{invoke}.{choice}": state.saves for (invoke, choice), state in self.choices.items() if state.saves}
        )

    def copy(self) -> Fold:
        """A copy whose containers are its own; arrays are shared, and read-only."""
        other = Fold(self.names)
        other.__dict__.update(self.__dict__)
        other.choices = {key: state.copy() for key, state in self.choices.items()}
        return other
