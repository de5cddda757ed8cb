"""`tracewire replay`: show a trace that ended, or that runs, as `tracewire run` shows it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import anyio

from tracewire.client import connect
from tracewire.traces.output import Event, Final, Output

from .commands import UsageError, add_command
from .presenters import presenter
from .run import succeeded

__all__ = ["Pace", "add_replay"]


def add_replay(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    replay = add_command(
        commands,
        "replay",
        _replay,
        parents=parents,
        help="show a trace from its beginning, at the pace at which it ran",
        exits={0: "the trace finished", 1: "an error, or the trace failed, was refused or was cancelled"},
        examples=("tracewire replay TRACE", "tracewire replay TRACE --speed 0 --names projection"),
        json="each event as a JSON object on a line",
    )
    replay.add_argument("trace", metavar="TRACE", help="the trace's id")
    what = "times the original pace; 0 shows everything at once (default: 1)"
    replay.add_argument("--speed", type=float, default=1.0, metavar="X", help=what)
    replay.add_argument("--names", nargs="+", metavar="NAME", help="show only these saved names")


class Pace:
    """Waits before each output, so that outputs come as fast as the engine made them, times `speed`."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began: tuple[float, float] | None = None

    def pause_before(self, event: Event, now: float) -> float:
        """How many seconds to wait at time `now` before the event is shown."""
        if not self._speed or not isinstance(event, Output) or not event.time:
            return 0.0
        if self._began is None:
            self._began = event.time, now
        due = self._began[1] + (event.time - self._began[0]) / self._speed
        return max(0.0, due - now)


async def _replay(options: argparse.Namespace) -> int:
    if not 0 <= options.speed < float("inf"):
        raise UsageError(f"--speed: expected a number from 0 on, got {options.speed:g}")
    pace = Pace(options.speed)
    async with connect(options.url, prefix=options.prefix) as client:
        saves = await _has_saves(client, options.trace) if not options.json else True
        subscription = client.subscribe(options.trace, names=options.names)
        async with subscription:
            with presenter(options.trace, as_json=options.json, saves=saves) as shown:
                async for event in subscription:
                    await anyio.sleep(pace.pause_before(event, anyio.current_time()))
                    shown.feed(event)
                    if isinstance(event, Final):
                        return 0 if succeeded(event) else 1
    return 0


async def _has_saves(client: Any, trace_id: str) -> bool:
    """Whether the trace has saves so far, or may yet have some."""
    state = await client.get_state(trace_id)
    if not state.finished:
        return True
    return bool(state.shared) or any(choice.saves for invoke in state.invokes for choice in invoke.choices)
