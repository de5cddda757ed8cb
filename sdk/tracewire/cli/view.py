"""A trace as commands show it, folded from its events: text, saves, live parameters, status."""

from __future__ import annotations

from typing import Any

from tracewire.traces.output import (
    Accepted,
    Event,
    Final,
    Gap,
    Output,
    Paused,
    Restarted,
    Resumed,
    Shared,
    Steered,
    Waiting,
)

from .chat_options import text_of
from .format import failure_text
from .readings import Readings

__all__ = ["TraceView"]


class TraceView:
    """A trace as a person sees it.

    Attributes:
        trace_id: the trace's id.
        texts: the text of each choice, by prompt and choice.
        readings: the saves of the first choice, and shared values, by name.
        live, live_version: the live parameters with their present values, and the version of these.
        status: `queued`, `running`, `paused`, `waiting`, or how the trace ended.
        engine: the engine that runs it, or ran it last.
        note: the last event besides outputs in words, such as a change of live parameters.
    """

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.texts: dict[tuple[int, int], str] = {}
        self.readings = Readings()
        self.live: dict[str, Any] = {}
        self.live_version = 0
        self.status = "queued"
        self.engine = ""
        self.note = ""
        self._counts: dict[tuple[int, int], int] = {}
        self._usage = 0
        self._first = self._last = (0.0, 0)

    @property
    def tokens(self) -> int:
        """How many tokens were sampled, those before the first event that was read included."""
        return self._usage or sum(self._counts.values())

    @property
    def ended(self) -> bool:
        """Whether the trace has ended."""
        return self.status not in ("queued", "running", "paused", "waiting")

    @property
    def rate(self) -> float:
        """Tokens a second, from the first output to the last, by the engine's clock."""
        took, tokens = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return tokens / took if took > 0 else 0.0

    @property
    def text(self) -> str:
        """The text; where there are several choices, each begins with its prompt's and its own number."""
        if len(self.texts) == 1:
            return next(iter(self.texts.values()))
        return "\n".join(f"[{invoke}.{choice}] {text}" for (invoke, choice), text in sorted(self.texts.items()))

    def feed(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Output():
                self._output(event)
            case Accepted():
                self.status, self.engine = "running", event.engine
                self.live, self.live_version = dict(event.live), event.live_version
            case Steered():
                for change in event.changes:
                    self.live |= change.values
                self.live_version = event.version
                changes = [f"{name}={value}" for name, value in event.changes[-1].values.items()]
                self.note = f"steered by {event.changes[-1].by}: {', '.join(changes)}"
            case Paused() | Resumed():
                self.status = "paused" if isinstance(event, Paused) else "running"
                self.note = f"{event.type} by {event.by}"
            case Waiting():
                self.status, self.note = "waiting", f"waits for another engine: {event.reason}"
            case Restarted():
                self._clear()
                self.note = f"restarted: {event.reason}"
            case Gap():
                self._resume(event)
            case Shared():
                self.readings.feed(event.delta)
            case Final():
                self.status = event.status
                self.note = failure_text(event.error)
                self._usage = event.usage.completion_tokens

    def _output(self, event: Output) -> None:
        key = event.invoke, event.choice
        before = self.texts.get(key, "")
        self.texts[key] = before + text_of(event, begun=bool(before))
        self._counts[key] = event.index + len(event.token_ids)
        self._last = event.time, self.tokens
        if not self._first[0]:
            self._first = self._last
        if self.status in ("queued", "waiting"):
            self.status = "running"
        if key == (0, 0):
            self.readings.feed(event.delta)

    def _clear(self) -> None:
        self.texts.clear()
        self.readings.clear()
        self._counts.clear()
        self._first = self._last = (0.0, 0)

    def _resume(self, gap: Gap) -> None:
        self._clear()
        for invoke in gap.state.invokes:
            for choice in invoke.choices:
                self.texts[choice.invoke, choice.choice] = choice.text
                self._counts[choice.invoke, choice.choice] = len(choice.token_ids)
                if (choice.invoke, choice.choice) == (0, 0):
                    self.readings.feed(choice.saves)
