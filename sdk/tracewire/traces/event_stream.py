"""Base of traces and subscriptions: iterates over the outputs alone, and over the text as it comes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from importlib import import_module
from typing import Any, Generic, TypeVar

from tracewire.errors import AmbiguousResult, TextChanged

from .ending import failure_of
from .output import Event, Output
from .readers import Reader
from .state import State

__all__ = ["EventStream"]

E = TypeVar("E", bound=Event)


class EventStream(Reader, Generic[E]):
    """An async iterator of a trace's events."""

    _trace_id: str
    _session: Any

    @abstractmethod
    async def __anext__(self) -> E:
        """The next event."""

    def _ipython_display_(self, spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None] | None = None) -> None:
        """Show the trace in a notebook, live. A trace that was not started is started, as reading it does.

        Raises:
            NotImplementedError: no notebook's kernel runs here, so that IPython shows the object as any other.
        """
        # By name, because the notebook's room lies above this one.
        import_module("tracewire.notebook.live").show(self, spawn)

    async def outputs(self) -> AsyncIterator[Output]:
        """The outputs alone, as they come. Each item is read once: this and iterating share the items.

        A trace that runs again after its engine was lost puts its outputs out again, from index 0 on. Outputs that
        were trimmed before the call read them are left out.
        """
        async for event in self:
            if isinstance(event, Output):
                yield event

    async def text_stream(self, *, invoke: int | None = None, choice: int | None = None) -> AsyncIterator[str]:
        """The text of one choice as it comes, in pieces that are not empty: of the only choice, or of the one that
        `invoke` and `choice` name, both from 0.

        The pieces together are the choice's text, each part of it once: also where the trace runs again after its
        engine was lost, and where events were trimmed before they were read. Each item is read once: this and iterating
        share the items. A stream that begins behind the first token has the text from there on; if the events at its
        beginning were trimmed, or if the trace runs again before the first piece came, it has the text from the first
        token on.

        Raises:
            AmbiguousResult: the trace has several choices, and the arguments name none.
            TextChanged: the trace runs again, and puts out another text than it did before.
            TraceRejected: the trace never ran.
            InterventionError: its block raised.
            TraceFailed: its engine could not go on, or it was cancelled or expired.
        """
        text = _Text(self._trace_id, invoke, choice)
        async for event in self:
            if piece := text.piece(event):
                yield piece


class _Text:
    """The text of one choice, and how much of it was handed out."""

    def __init__(self, trace_id: str, invoke: int | None, choice: int | None) -> None:
        self._trace_id = trace_id
        self._named = invoke is not None or choice is not None
        self._wanted = (invoke or 0, choice or 0)
        #: The index of the first token whose text was handed out; None before that.
        self._first: int | None = None
        #: The text handed out so far, in pieces.
        self._handed: list[str] = []
        #: How many characters an attempt that repeats the text has put out; None once it has caught up.
        self._repeated: int | None = None

    def piece(self, event: Event) -> str:
        """The text that an event adds."""
        match event.type:
            case "output":
                where = event.invoke, event.choice
                if where != self._wanted:
                    self._check(where)
                    return ""
                if self._first is None:
                    self._first = event.index
                return self._add(self._from_first(event.text, event.index, len(event.token_ids)))
            case "gap":
                return self._whole(event.state)
            case "restarted":
                self._repeated = 0
            case "final":
                failure = failure_of(self._trace_id, event.status, event.error)
                if failure is not None:
                    raise failure
        return ""

    def _check(self, where: tuple[int, int]) -> None:
        if not self._named:
            raise AmbiguousResult(
                f"trace {self._trace_id} has several choices: text_stream(invoke={where[0]}, choice={where[1]}) "
                "reads one of them"
            )

    def _whole(self, state: State) -> str:
        found = {(one.invoke, one.choice): one for invoke in state.invokes for one in invoke.choices}
        for where in found:
            if where != self._wanted:
                self._check(where)
        self._repeated = 0
        self._first = self._first or 0
        choice = found.get(self._wanted)
        return "" if choice is None else self._add(self._from_first(choice.text, 0, len(choice.token_ids)))

    def _from_first(self, text: str, index: int, count: int) -> str:
        """The text of `count` tokens from `index` on, without that of tokens before the first one handed out."""
        assert self._first is not None
        before = self._first - index
        if before <= 0:
            return text
        return "" if before >= count else text[_begin(text, "".join(self._handed), len(text) * before / count) :]

    def _add(self, text: str) -> str:
        if self._repeated is not None:
            self._handed = ["".join(self._handed)]
            handed = self._handed[0]
            expected = handed[self._repeated : self._repeated + len(text)]
            if not text.startswith(expected):
                raise TextChanged(self._trace_id, len(handed))
            self._repeated += len(text)
            text = text[len(expected) :]
            if self._repeated >= len(handed):
                self._repeated = None
        if text:
            self._handed.append(text)
        return text


def _begin(text: str, handed: str, about: float) -> int:
    """Where in a text of several tokens the handed-out text begins, which is `about` at that character.

    Only the text itself shows where a token begins. If the handed-out text is there more than once, the place next to
    `about` counts. If it goes on behind the text, as much of it as is there does.
    """
    found, at = [], text.find(handed)
    while at >= 0:
        found.append(at)
        at = text.find(handed, at + 1)
    if found:
        return min(found, key=lambda at: abs(at - about))
    later = range(max(0, len(text) - len(handed)), len(text))
    return next((at for at in later if text[at] == handed[0] and handed.startswith(text[at:])), round(about))
