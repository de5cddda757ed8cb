"""`tracewire replay`: show a trace, or a recording of one, as `tracewire run` shows it; or run a recording again."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec

from tracewire.client import connect
from tracewire.traces.output import Event, Final, Output, only
from tracewire.traces.recorder.recording import Recording

from .commands import UsageError, add_command
from .presenters import presenter
from .printing import print_json
from .record import SUFFIX
from .run import succeeded

__all__ = ["Pace", "add_replay"]


def add_replay(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    replay = add_command(
        commands,
        "replay",
        _replay,
        parents=parents,
        help="show a trace or a recording from its beginning, at the pace at which it ran; or run a recording again",
        exits={
            0: "the trace finished; with --on, all tokens and values are the same",
            1: "an error, or the trace failed, was refused or was cancelled; with --on, something differs",
        },
        examples=(
            "tracewire replay TRACE",
            "tracewire replay trace.twrec --speed 4",
            "tracewire replay trace.twrec --on demo",
        ),
        json="each event as a JSON object on a line; with --on, an object: trace_id, status, same, choices, notes",
    )
    what = "the trace's id, or a file of `tracewire record`, which needs no Redis to be shown"
    replay.add_argument("trace", metavar="TRACE|FILE", help=what)
    what = "times the original pace; 0 shows everything at once (default: 1)"
    replay.add_argument("--speed", type=float, default=1.0, metavar="X", help=what)
    replay.add_argument("--names", nargs="+", metavar="NAME", help="show only these saved names")
    what = "run the recording again on an engine of this model, and name the first token and values that differ"
    replay.add_argument("--on", metavar="MODEL", help=what)
    what = "with --on: numbers that differ by at most this are the same (default: 0)"
    replay.add_argument("--tolerance", type=float, default=0.0, metavar="X", help=what)


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
    if not 0 <= options.tolerance < float("inf"):
        raise UsageError(f"--tolerance: expected a number from 0 on, got {options.tolerance:g}")
    recording = _recording(options)
    if recording is None:
        if options.on is not None:
            raise UsageError(
                f"--on: expected a recording to run again, and {options.trace} is no file: tracewire record"
            )
        async with connect(options.url, prefix=options.prefix) as client:
            saves = await _has_saves(client, options.trace) if not options.json else True
            async with client.subscribe(options.trace, names=options.names) as subscription:
                return await _show(subscription, options, saves)
    if options.on is not None:
        return await _run_again(recording, options)
    state = recording.state()
    saves = bool(state.shared) or any(choice.saves for invoke in state.invokes for choice in invoke.choices)
    names = None if options.names is None else frozenset(options.names)
    return await _show(_read(recording, names), options, saves)


def _recording(options: argparse.Namespace) -> Recording | None:
    path = Path(options.trace)
    if not path.is_file():
        if path.suffix == SUFFIX:
            raise UsageError(f"{path}: no such file")
        return None
    return Recording.open(path)


async def _read(recording: Recording, names: frozenset[str] | None) -> AsyncIterator[Event]:
    for event in recording.events():
        yield event if names is None else only(event, names)


async def _show(events: AsyncIterable[Event], options: argparse.Namespace, saves: bool) -> int:
    pace = Pace(options.speed)
    with presenter(options.trace, as_json=options.json, saves=saves) as shown:
        async for event in events:
            await anyio.sleep(pace.pause_before(event, anyio.current_time()))
            shown.feed(event)
            if isinstance(event, Final):
                return 0 if succeeded(event) else 1
    return 0


async def _run_again(recording: Recording, options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        found = await client.replay(recording, model=options.on, tolerance=options.tolerance)
    if options.json:
        print_json({**msgspec.to_builtins(found), "same": found.same})
    else:
        print(found)
    return 0 if found.same else 1


async def _has_saves(client: Any, trace_id: str) -> bool:
    """Whether the trace has saves so far, or may yet have some."""
    state = await client.get_state(trace_id)
    if not state.finished:
        return True
    return bool(state.shared) or any(choice.saves for invoke in state.invokes for choice in invoke.choices)
