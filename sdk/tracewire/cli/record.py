"""`tracewire record`: a trace in one file, which can be shown without an engine and run again on one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracewire.client import connect

from .commands import UsageError, add_command
from .printing import print_json, remark

__all__ = ["SUFFIX", "add_record"]

#: How the names of recordings end.
SUFFIX = ".twrec"


def add_record(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    record = add_command(
        commands,
        "record",
        _record,
        parents=parents,
        help="write a trace to one file: events, steering, submission, versions; waits for the trace's end",
        exits={0: "the file is written", 1: "an error"},
        examples=("tracewire record TRACE", "tracewire record TRACE -o trace.twrec --now"),
        json="an object: file, trace_id, events, complete, again (whether it can run again)",
    )
    record.add_argument("trace", metavar="TRACE", help="the trace's id")
    what = f"the file (default: TRACE{SUFFIX})"
    record.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)
    record.add_argument("--now", action="store_true", help="end with the last event so far, and do not wait")
    what = "download large arrays into the file, or leave references to them (default: inside)"
    record.add_argument("--arrays", choices=("inside", "reference"), default="inside", help=what)


async def _record(options: argparse.Namespace) -> int:
    path = options.output or Path(f"{options.trace}{SUFFIX}".replace("/", "_"))
    if not path.parent.is_dir():
        raise UsageError(f"--output: no such folder: {path.parent}")
    async with connect(options.url, prefix=options.prefix) as client:
        recording = await client.record(options.trace, arrays=options.arrays, until_now=options.now)
    try:
        recording.save(path)
    except OSError as error:
        raise UsageError(f"--output: {path}: {error.strerror}") from None
    events = sum(1 for _ in recording.events())
    again = recording.submission is not None
    if options.json:
        about = {"trace_id": recording.trace_id, "events": events, "complete": recording.complete, "again": again}
        print_json({"file": str(path), **about})
        return 0
    print(f"{path}: {events} events{'' if recording.complete else ', incomplete'}")
    if not again:
        remark("tracewire: the trace had ended, or its submission may not be read: the file cannot run again")
    return 0
