"""What a static rendering needs beside a trace's folded state: the text of each token, and where it was steered."""

from __future__ import annotations

from typing import Any

from tracewire.rendering.page import Mark, Page
from tracewire.rendering.previews import number
from tracewire.traces.output import Event, Gap, Output, Restarted, Steered
from tracewire.traces.state import State
from tracewire_bus.domain.fold import Fold

__all__ = ["Recording"]


class Recording:
    """The events of one trace so far. `fold` is the caller's to apply them to, before `take`."""

    def __init__(self, trace_id: str) -> None:
        self.fold = Fold()
        self._trace_id = trace_id
        self._pieces: dict[tuple[int, int], list[str]] = {}
        self._marks: dict[tuple[int, int], list[Mark]] = {}

    def take(self, event: Event) -> None:
        """Take the next event in."""
        match event:
            case Output():
                pieces = self._pieces.setdefault((event.invoke, event.choice), [])
                del pieces[event.index :]
                pieces += _pieces(event)
            case Steered():
                for one in event.first:
                    marks = self._marks.setdefault((one.invoke, one.choice), [])
                    marks += [Mark(one.index, _label(change.values, change.by)) for change in event.changes]
            case Restarted():
                self._pieces.clear()
                self._marks.clear()
            case Gap():
                self._pieces = {
                    (one.invoke, one.choice): list(one.token_strings or _first(one.text, len(one.token_ids)))
                    for invoke in event.state.invokes
                    for one in invoke.choices
                }

    def page(self) -> Page:
        """What a rendering shows of it now."""
        return State(self._trace_id, self.fold)._page(self._pieces, self._marks)


def _pieces(output: Output) -> list[str]:
    count, strings = len(output.token_ids), output.token_strings
    if strings is not None and len(strings) == count and "".join(strings) == output.text:
        return strings
    return _first(output.text, count)


def _first(text: str, count: int) -> list[str]:
    """The texts of tokens that cannot be told apart: the first has all of it."""
    return [text, *[""] * (count - 1)] if count else []


def _label(values: dict[str, Any], by: str) -> str:
    parts = [f"{name} = {number(value) if isinstance(value, int | float) else '…'}" for name, value in values.items()]
    return f"{', '.join(parts)} · {by}"
