"""`tracewire top`: engines and traces, live, with plots of what traces save; a trace can be opened and steered."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from tracewire.client import connect

from .commands import UsageError, add_command
from .fleet import Fleet
from .keys import one_key_at_a_time, read_keys
from .model_names import add_model
from .printing import no_engines, print_json_line, print_rows, rich_terminal
from .top_screen import TopScreen

__all__ = ["add_top"]

#: How often the screen is drawn, in seconds.
_DRAWN_S = 0.2


def add_top(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    top = add_command(
        commands,
        "top",
        _top,
        parents=parents,
        help="watch engines and running traces; enter opens a trace, arrows steer it",
        examples=("tracewire top", "tracewire top --json --count 1"),
        json="an object on a line for each look: time, engines, traces",
    )
    add_model(top, "--model", help="only this model's engines and traces")
    what = "seconds between two looks at the lists of engines and traces (default: 1)"
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help=what)
    what = "without a terminal, or with --json: end after N looks (default: 1; with --json any number)"
    top.add_argument("--count", type=int, metavar="N", help=what)


async def _top(options: argparse.Namespace) -> int:
    if not 0.05 <= options.interval <= 3600:
        raise UsageError(f"--interval: expected seconds from 0.05 to 3600, got {options.interval:g}")
    if options.count is not None and options.count < 1:
        raise UsageError(f"--count: expected a positive number, got {options.count}")
    async with connect(options.url, prefix=options.prefix) as client, anyio.create_task_group() as group:
        fleet = Fleet(client, group, options.model)
        if options.json or options.count is not None or not (rich_terminal() and sys.stdin.isatty()):
            await _print_looks(fleet, options, client.url)
        else:
            await _show(TopScreen(client, fleet, client.url, options.prefix), fleet, options.interval)
        group.cancel_scope.cancel()
    return 0


async def _print_looks(fleet: Fleet, options: argparse.Namespace, url: str) -> None:
    count = options.count if options.count is not None else None if options.json else 1
    await fleet.look()
    while count is None or count > 0:
        await anyio.sleep(options.interval)
        await fleet.look()
        found = fleet.snapshot()
        if options.json:
            print_json_line(found)
        else:
            if not found["engines"]:
                no_engines(url, options.prefix, options.model, fleet.served)
            print_rows(
                ("engine", "model", "state", "running", "tokens/s"),
                [
                    (
                        one["name"],
                        one["model"],
                        one["state"],
                        f"{one['running']} of {one['capacity']} traces",
                        one["tokens_per_second"],
                    )
                    for one in found["engines"]
                ],
            )
            print_rows(
                ("trace", "model", "state", "tokens", "tokens/s", "saves"),
                [
                    (
                        one["trace_id"],
                        one["model"],
                        one["state"],
                        f"{one['tokens']} tokens",
                        one["tokens_per_second"],
                        "  ".join(f"{name}={text}" for name, text in one["saves"].items()),
                    )
                    for one in found["traces"]
                ],
            )
        count = None if count is None else count - 1


async def _show(screen: TopScreen, fleet: Fleet, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    await fleet.look()

    def drawing() -> Any:
        return screen.draw(*console.size)

    with one_key_at_a_time(), Live(drawing(), console=console, screen=True, auto_refresh=False) as live:
        async with anyio.create_task_group() as group:

            async def look() -> None:
                while True:
                    await anyio.sleep(interval)
                    await fleet.look()

            async def draw() -> None:
                while True:
                    live.update(drawing(), refresh=True)
                    await anyio.sleep(_DRAWN_S)

            group.start_soon(look)
            group.start_soon(draw)
            async for key in read_keys():
                if not await screen.press(key):
                    break
                live.update(drawing(), refresh=True)
            group.cancel_scope.cancel()
