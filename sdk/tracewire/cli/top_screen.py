"""The screen of `tracewire top`: the trace that is chosen or open, the keys, and the drawing."""

from __future__ import annotations

import time
from typing import Any

from tracewire.client import Client
from tracewire.errors import TracewireError
from tracewire_bus.transport.urls import redacted

from .fleet import Fleet, Followed
from .presenters import trace_drawing
from .printing import engineless

__all__ = ["TopScreen"]

_PLOT = 24
_LIST_KEYS = "up/down choose   enter opens   p pauses or resumes   c cancels   q quits"
_TRACE_KEYS = "left/right steer   up/down choose   [ ] step   p pauses or resumes   c cancels   esc back   q quits"


class TopScreen:
    """The list of engines and traces, or one trace that is open."""

    def __init__(self, client: Client, fleet: Fleet, url: str, prefix: str) -> None:
        self._client = client
        self._fleet = fleet
        self._url = url
        self._prefix = prefix
        self._chosen = ""
        self._open: Followed | None = None
        self._parameter = ""
        self._step = 1.0
        #: The values that this screen has asked for, each with the version whose event will confirm it.
        self._asked: dict[str, tuple[Any, int]] = {}
        #: The trace that a second `c` cancels.
        self._cancelling = ""
        self._note = ""

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def press(self, key: str) -> bool:
        """Obey a key. Returns `False` if the screen is to close."""
        self._note = ""
        if key in ("q", "interrupt"):
            return False
        if key != "c":
            self._cancelling = ""
        try:
            if self._open is None:
                await self._press_in_list(key)
            else:
                await self._press_in_trace(key, self._open)
        except TracewireError as error:
            self._note = str(error)
        return True

    async def _press_in_list(self, key: str) -> None:
        traces = list(self._fleet.traces)
        if not traces:
            return
        at = traces.index(self._chosen) if self._chosen in traces else 0
        if key in ("up", "k", "down", "j"):
            at += 1 if key in ("down", "j") else -1
        self._chosen = traces[max(0, min(at, len(traces) - 1))]
        if key == "enter":
            await self._enter(self._fleet.traces[self._chosen])
        elif key in ("p", "c"):
            await self._hold_or_cancel(key, self._fleet.traces[self._chosen])

    async def _enter(self, followed: Followed) -> None:
        # From its beginning, so that the whole text and all saves are there.
        self._open = self._fleet.follow(followed.listed, "start")
        self._asked.clear()
        live = (await self._client.get_live(followed.listed.trace_id)).values
        self._open.view.live |= live
        numbers = self._numbers(self._open)
        self._parameter = numbers[0] if numbers else ""

    async def _press_in_trace(self, key: str, opened: Followed) -> None:
        numbers = self._numbers(opened)
        if key in ("escape", "backspace"):
            opened.scope.cancel()
            self._open = None
        elif key in ("p", "c"):
            await self._hold_or_cancel(key, opened)
        elif key in ("[", "]"):
            self._step *= 2 if key == "]" else 0.5
        elif not numbers:
            self._note = "this trace has no live parameter that is a number"
        elif key in ("up", "down", "tab"):
            at = numbers.index(self._parameter) if self._parameter in numbers else 0
            self._parameter = numbers[(at + (-1 if key == "up" else 1)) % len(numbers)]
        elif key in ("left", "right"):
            await self._steer(opened, self._step if key == "right" else -self._step)

    @staticmethod
    def _numbers(followed: Followed) -> list[str]:
        return [name for name, value in followed.view.live.items() if isinstance(value, int | float)]

    async def _steer(self, opened: Followed, by: float) -> None:
        name = self._parameter
        present = self._value(opened, name)
        value: Any = (not present) if isinstance(present, bool) else type(present)(present + by)
        version = await self._client.steer(opened.listed.trace_id, {name: value})
        self._asked[name] = value, version
        self._note = f"version {version}: {name}={value}"

    def _value(self, opened: Followed, name: str) -> Any:
        """The value of a live parameter as it is, or as this screen has asked for."""
        value, version = self._asked.get(name, (None, 0))
        return value if version > opened.view.live_version else opened.view.live[name]

    async def _hold_or_cancel(self, key: str, followed: Followed) -> None:
        trace_id = followed.listed.trace_id
        if key == "c" and self._cancelling != trace_id:
            self._cancelling = trace_id
            self._note = f"press c again to cancel {trace_id}"
        elif key == "c":
            cancelled = await self._client.cancel(trace_id, "cancelled in tracewire top")
            self._note = f"{trace_id}: {'cancelled' if cancelled else 'had ended already'}"
        elif followed.state == "paused":
            await self._client.resume(trace_id)
            self._note = f"{trace_id}: resumed"
        else:
            await self._client.pause(trace_id)
            self._note = f"{trace_id}: paused"

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, width: int, height: int) -> Any:
        """The screen, for rich."""
        from rich.console import Group
        from rich.text import Text

        body = self._draw_list(height) if self._open is None else self._draw_trace(self._open, width, height)
        keys = _LIST_KEYS if self._open is None else _TRACE_KEYS
        foot = self._note or self._fleet.error
        return Group(body, Text(foot, style="yellow", no_wrap=True, overflow="ellipsis"), Text(keys, style="dim"))

    def _draw_list(self, height: int) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        engines = Table.grid(padding=(0, 2))
        for one in self._fleet.engines:
            speed = f"{self._fleet.tokens_per_second(one.name):.1f} tokens/s"
            engines.add_row(Text(one.name), one.model, one.state, f"{one.running} of {one.capacity} traces", speed)
        traces = Table.grid(padding=(0, 2))
        now = time.monotonic()
        shown = list(self._fleet.traces.values())[: max(1, height - len(self._fleet.engines) - 6)]
        if self._chosen not in self._fleet.traces:
            self._chosen = shown[0].listed.trace_id if shown else ""
        for trace in shown:
            style = "reverse" if trace.listed.trace_id == self._chosen else ""
            mark = ">" if style else " "
            speed = f"{trace.rate.value(now):.1f} tokens/s"
            cells = [f"{mark} {trace.listed.trace_id[:12]}", trace.listed.model, trace.state]
            cells += [f"{trace.view.tokens} tokens", speed, _first_plot(trace)]
            traces.add_row(*(Text(cell, style=style) for cell in cells))
        about = self._url, self._prefix, self._fleet.model, self._fleet.served
        nothing = engineless(*about) if not self._fleet.engines else ""
        head = Text(f"tracewire top   {redacted(self._url)}   {len(self._fleet.traces)} running traces", style="bold")
        return Group(head, Text(""), Text(nothing) if nothing else engines, Text(""), traces)

    def _draw_trace(self, opened: Followed, width: int, height: int) -> Any:
        from rich.console import Group
        from rich.text import Text

        view = opened.view
        head = Text(f"{view.trace_id}   {opened.listed.model}   {view.engine}", style="bold")
        lines = []
        for name in self._numbers(opened):
            mark = ">" if name == self._parameter else " "
            coming = f" -> {self._value(opened, name)}" if self._value(opened, name) != view.live[name] else ""
            step = f"   (step {self._step:g})" if mark == ">" else ""
            lines.append(Text(f"{mark} {name} = {view.live[name]}{coming}{step}", style="bold" if mark == ">" else ""))
        body = trace_drawing(view, width, max(3, height - len(lines) - 4))
        return Group(head, *lines, Text(""), body)


def _first_plot(trace: Followed) -> str:
    """The first save that can be plotted, with its name."""
    for name, reading in trace.view.readings.by_name.items():
        if plot := reading.plot(_PLOT):
            return f"{name} {plot} {reading.text if reading.numbers else ''}".rstrip()
    return ""
