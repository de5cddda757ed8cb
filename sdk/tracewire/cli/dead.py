"""`tracewire dead`: the dead-letter queue."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec

from tracewire.client import connect
from tracewire.errors import UnknownDeadLetter

from .format import timestamp

__all__ = ["add_dead"]


def add_dead(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    dead = commands.add_parser("dead", help="the dead-letter queue: list, show, resubmit or drop its entries")
    actions = dead.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("list", _list, "list the dead letters, the oldest first"),
        ("show", _show, "print a dead letter as JSON"),
        ("resubmit", _resubmit, "submit the named dead letters again, and print the new traces' ids"),
        ("drop", _drop, "remove the named dead letters"),
    ):
        action = actions.add_parser(name, parents=[shared], help=text)
        action.set_defaults(run=run)
        if name == "list":
            action.add_argument("--model", metavar="MODEL", help="only those of this model")
        else:
            action.add_argument("ids", metavar="ID", nargs=1 if name == "show" else "+", help="the dead letter's id")


async def _list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        async for letter in client.dead_letters.list(model=options.model):
            print("\t".join((letter.id, timestamp(letter.time), letter.model, letter.trace_id, letter.reason)))
    return 0


async def _show(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        letter = await client.dead_letters.get(options.ids[0])
    shown = {name: getattr(letter, name) for name in ("id", "model", "trace_id", "reason", "problem")}
    shown["time"] = timestamp(letter.time)
    shown["submission"] = msgspec.to_builtins(letter.submission, builtin_types=(bytes,), enc_hook=_brief)
    print(json.dumps(shown, ensure_ascii=False, indent=2, default=_json_fallback))
    return 0


def _brief(value: Any) -> str:
    """An array, or a reference to one, by type and size."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"<{value.dtype} {list(shape)}>"


def _json_fallback(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)


async def _resubmit(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for id_ in options.ids:
            print(f"{id_} resubmitted as trace {await client.dead_letters.resubmit(id_)}", flush=True)
    return 0


async def _drop(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for id_ in options.ids:
            if not await client.dead_letters.drop(id_):
                raise UnknownDeadLetter(id_)
    return 0
