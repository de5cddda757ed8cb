"""How `run`, `replay` and `chat` show a trace while it runs: as JSON lines, as plain lines, or live on a terminal."""

from __future__ import annotations

import json
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from tracewire.traces.output import Accepted, Event, Final, Output, Shared

from .chat_options import text_of
from .format import counted, event_line, printable
from .printing import print_json_line, remark, rich_terminal
from .readings import line_of
from .view import TraceView

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Presenter", "presenter"]

#: How often the live view is drawn, a second.
_DRAWN = 10
#: How much of the terminal's width the saves take.
_SIDE = 0.42


class Presenter(Protocol):
    """Shows the events of one trace."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def feed(self, event: Event) -> None:
        """Show an event."""


def presenter(trace_id: str, *, as_json: bool, saves: bool) -> Presenter:
    """The presenter for standard output. `saves` says whether the trace may have any."""
    if as_json:
        return JsonLines(trace_id)
    if not saves:
        return TextStream()
    return LiveView(trace_id) if rich_terminal() else PlainLines()


class _Simple:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class JsonLines(_Simple):
    """Each event as a JSON object on a line, in the form that the gateway has (docs/gateway.md)."""

    def __init__(self, trace_id: str) -> None:
        self._trace_id = trace_id

    def feed(self, event: Event) -> None:
        """Print the event."""
        # Imported here: only JSON needs it.
        from tracewire.gateway.event_json import event_json

        print_json_line(event_json(event, "list", self._trace_id))


class TextStream(_Simple):
    """The text alone, as it comes; other events are lines on standard error."""

    def __init__(self) -> None:
        self._last: tuple[int, int] = (0, 0)
        self._text = ""

    def feed(self, event: Event) -> None:
        """Print the text of an output."""
        if isinstance(event, Output):
            if (event.invoke, event.choice) != self._last:
                self._last = event.invoke, event.choice
                self._write(f"\n[{event.invoke}.{event.choice}] ")
            self._write(text_of(event, begun=bool(self._text)))
        elif isinstance(event, Final):
            if self._text and not self._text.endswith("\n"):
                self._write("\n")
            if event.error is not None:
                remark(f"tracewire: {event_line(event)}")
        elif not isinstance(event, Accepted | Shared):
            remark(f"tracewire: {event_line(event)}")

    def _write(self, text: str) -> None:
        self._text = text or self._text
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class PlainLines(_Simple):
    """A line for each output: its index, its text as JSON, and the last item of each save."""

    def feed(self, event: Event) -> None:
        """Print the event."""
        if isinstance(event, Output):
            where = f"{event.invoke}.{event.choice} " if event.invoke or event.choice else ""
            text = json.dumps(text_of(event, begun=False), ensure_ascii=False)
            print(f"{where}{event.index:5d} {text:16}  {line_of(event.delta)}".rstrip(), flush=True)
        elif isinstance(event, Shared):
            print(f"      shared  {line_of(event.delta)}", flush=True)
        else:
            print(event_line(event), flush=True)


class LiveView:
    """The text, and beside it the saves with plots, drawn again and again on a terminal. The last drawing stays."""

    def __init__(self, trace_id: str) -> None:
        from rich.console import Console

        self._view = TraceView(trace_id)
        self._console = Console()
        self._live: Live | None = None
        #: A thread of rich draws the view.
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(
            get_renderable=self._drawing, console=self._console, refresh_per_second=_DRAWN, transient=True
        )
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._console.print(trace_drawing(self._view, self._console.width))

    def feed(self, event: Event) -> None:
        """Take the event; it is drawn soon."""
        with self._lock:
            self._view.feed(event)

    def _drawing(self) -> Any:
        width, height = self._console.size
        with self._lock:
            return trace_drawing(self._view, width, height - 1)


def trace_drawing(view: TraceView, width: int, height: int | None = None) -> Any:
    """A trace's text with its saves beside it. `height` limits the lines: of a longer text the end is shown."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    side = int(width * _SIDE) if view.readings.by_name else 0
    text = Text(printable(view.text) or " ")
    rows = max(1, height - 2) if height is not None else None
    if rows is not None:
        from rich.console import Console

        lines = text.wrap(Console(width=width), max(10, width - side - 2))
        text = Text("\n").join(lines[-rows:])
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1, overflow="fold")
    if side:
        grid.add_column(width=side)
    grid.add_row(text, *([saves_drawing(view, side, rows)] if side else []))
    # The last drawing has no limit, and shows the whole of an error.
    overflow: Any = "fold" if height is None else "ellipsis"
    return Group(grid, Text(status_line(view), style="dim", no_wrap=height is not None, overflow=overflow))


def saves_drawing(view: TraceView, width: int, rows: int | None = None) -> Any:
    """The saves of a trace: a line each, with its name, a plot and its last item."""
    from rich.table import Table
    from rich.text import Text

    found = list(view.readings.by_name.items())[:rows]
    longest = max((len(name) for name, _ in found), default=0)
    plotted = max(8, width - longest - 14)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold", no_wrap=True, overflow="ellipsis", max_width=max(8, width // 3))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=plotted)
    table.add_column(no_wrap=True, overflow="ellipsis", justify="right")
    for name, reading in found:
        plot = reading.plot(plotted)
        if plot:
            last = reading.text if reading.numbers else ""
            table.add_row(Text(name), Text(plot, style="cyan"), Text(last))
        else:
            table.add_row(Text(name), Text(reading.text), Text(""))
    return table


def status_line(view: TraceView) -> str:
    """One line about a trace: its status, its tokens, its live parameters, and its last other event."""
    parts = [view.status, counted(view.tokens, "token")]
    if view.rate:
        parts.append(f"{view.rate:.1f} tokens/s")
    parts += [f"{name}={value}" for name, value in view.live.items() if isinstance(value, int | float | str)]
    return ", ".join([*parts, *([view.note] if view.note else [])])
