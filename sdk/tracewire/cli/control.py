"""`tracewire steer`, `pause`, `resume`, `cancel` and `state`: control a trace of any client, and look at it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tracewire.client import connect
from tracewire.traces.state import State

from .commands import UsageError, add_command
from .format import counted, failure_text
from .printing import print_json, remark
from .readings import Readings
from .specs import named_value, values_by_name

__all__ = ["add_control"]


def add_control(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommands."""
    steer = add_command(
        commands,
        "steer",
        _steer,
        parents=parents,
        help="change live parameters of a trace, all of them at once",
        exits={1: "an error, or the change was refused: an unknown name, a wrong type, another version"},
        examples=("tracewire steer TRACE alpha=8", "tracewire steer TRACE alpha=0 direction=@direction.npy"),
        json="an object: trace_id, version",
    )
    _add_trace(steer)
    what = "a live parameter and its value: a number, a word, JSON, or @FILE with an array"
    steer.add_argument("values", type=named_value, metavar="NAME=VALUE", nargs="+", help=what)
    what = "make the change only if the live parameters are at this version (tracewire state shows it)"
    steer.add_argument("--if-version", type=int, metavar="VERSION", help=what)

    for name, run, what, changed in (
        ("pause", _pause, "pause a trace until it is resumed; its deadline keeps counting", "paused"),
        ("resume", _resume, "let a paused trace go on", "resumed"),
    ):
        parser = add_command(
            commands,
            name,
            run,
            parents=parents,
            help=what,
            json=f"an object: trace_id, changed (whether it was {changed})",
        )
        _add_trace(parser)
        if name == "pause":
            what = "the engine ends the pause by itself after so many seconds (default: it never does)"
            parser.add_argument("--timeout", type=float, metavar="SECONDS", help=what)
            what = "what the engine does then (default: resume)"
            parser.add_argument("--on-timeout", choices=("resume", "cancel"), default="resume", help=what)
    cancel = add_command(
        commands,
        "cancel",
        _cancel,
        parents=parents,
        help="cancel a trace, queued or running",
        json="an object: trace_id, changed (whether it had not ended yet)",
    )
    _add_trace(cancel)
    cancel.add_argument("--reason", default="", metavar="TEXT", help="the reason, which the trace's consumers read")
    state = add_command(
        commands,
        "state",
        _state,
        parents=parents,
        help="print a trace as it is now: its status, live parameters, text and saves",
        json="an object in the form of the gateway's GET /traces/ID, with live and live_version as they are now",
    )
    _add_trace(state)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="the trace's id")


async def _steer(options: argparse.Namespace) -> int:
    values = values_by_name(options.values)
    async with connect(options.url, prefix=options.prefix) as client:
        live = (await client.get_live(options.trace)).values
        # A number that was declared as one with a fraction can be given without.
        fitting = {name: _fitting(value, live.get(name)) for name, value in values.items()}
        version = await client.steer(options.trace, fitting, if_version=options.if_version)
    if options.json:
        print_json({"trace_id": options.trace, "version": version})
    else:
        print(f"{options.trace}: version {version}")
    return 0


def _fitting(value: Any, declared: Any) -> Any:
    if isinstance(declared, float) and type(value) is int:
        return float(value)
    if isinstance(declared, str) and not isinstance(value, str) and isinstance(value, int | float | bool):
        return str(value)
    return value


async def _pause(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        try:
            end = {"timeout": options.timeout, "on_timeout": options.on_timeout}
            changed = await client.pause(options.trace, **end)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
    return _changed(options, changed, "paused", "was paused already")


async def _resume(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        changed = await client.resume(options.trace)
    return _changed(options, changed, "resumed", "was not paused")


async def _cancel(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        changed = await client.cancel(options.trace, options.reason)
    return _changed(options, changed, "cancelled", "had ended already")


def _changed(options: argparse.Namespace, changed: bool, done: str, otherwise: str) -> int:
    if options.json:
        print_json({"trace_id": options.trace, "changed": changed})
    else:
        print(f"{options.trace}: {done if changed else otherwise}")
    return 0


async def _state(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        state = await client.get_state(options.trace)
        live = await client.get_live(options.trace)
    if options.json:
        # Imported here: only JSON needs them.
        from tracewire.gateway.event_json import state_json
        from tracewire.gateway.json_values import to_json

        found = state_json(state, "list")
        print_json({**found, "live": to_json(live.values, "list", state.trace_id), "live_version": live.version})
        return 0
    _print_state(state)
    if live.values:
        shown = "  ".join(f"{name}={value}" for name, value in live.values.items())
        print(f"live\tversion {live.version}\t{shown}")
    return 0


def _print_state(state: State) -> None:
    running = "paused" if state.paused else "running" if state.accepted is not None else "queued"
    choices = [choice for invoke in state.invokes for choice in invoke.choices]
    tokens = sum(len(choice.token_ids) for choice in choices)
    engine = state.accepted.engine if state.accepted is not None else "-"
    error = failure_text(state.error)
    print("\t".join([state.status or running, counted(tokens, "token"), engine, *([error] if error else [])]))
    for choice in choices:
        where = f"{choice.invoke}.{choice.choice}"
        print(f"text\t{where}\t{choice.text!r}")
        readings = Readings()
        readings.feed(choice.saves)
        for name, reading in readings.by_name.items():
            length = f"{len(choice.saves[name])} items, last: " if isinstance(choice.saves[name], list) else ""
            print(f"save\t{where}\t{name}\t{length}{reading.text}")
    for where, reason in state.save_errors.items():
        remark(f"tracewire: the save {where} could not travel: {reason}")
