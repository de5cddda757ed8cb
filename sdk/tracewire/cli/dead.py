"""`tracewire dead`: the dead-letter queue."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tracewire.client import connect
from tracewire.errors import UnknownDeadLetter

from .commands import add_command, add_group
from .format import timestamp
from .model_names import add_model
from .printing import place, print_json, print_json_line, print_rows, remark

__all__ = ["add_dead"]

_COLUMNS = ("id", "time", "model", "trace_id", "reason")


def add_dead(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    actions = add_group(commands, "dead", "the dead-letter queue: list, show, resubmit or drop its entries")
    for name, run, text, json_ in (
        (
            "list",
            _list,
            "list the dead letters, the oldest first",
            f"a list of objects: {', '.join(_COLUMNS)}",
        ),
        ("show", _show, "print a dead letter as JSON", "the same: a dead letter is printed as JSON anyway"),
        (
            "resubmit",
            _resubmit,
            "submit the named dead letters again, and print the new traces' ids",
            "an object on a line for each: id, trace_id",
        ),
        ("drop", _drop, "remove the named dead letters", ""),
    ):
        action = add_command(actions, name, run, parents=parents, help=text, json=json_)
        if name == "list":
            add_model(action, "--model", help="only those of this model")
        else:
            action.add_argument("ids", metavar="ID", nargs=1 if name == "show" else "+", help="the dead letter's id")


async def _list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        letters = await client.dead_letters.list(model=options.model)
        url = client.url
    rows = [(letter.id, timestamp(letter.time), letter.model, letter.trace_id, letter.reason) for letter in letters]
    if options.json:
        print_json([dict(zip(_COLUMNS, row, strict=True)) for row in rows])
        return 0
    if not rows:
        remark(f"No dead letters{f' of {options.model!r}' if options.model else ''} on {place(url, options.prefix)}.")
    print_rows(_COLUMNS, rows)
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
            trace_id = await client.dead_letters.resubmit(id_)
            if options.json:
                print_json_line({"id": id_, "trace_id": trace_id})
            else:
                print(f"{id_} resubmitted as trace {trace_id}", flush=True)
    return 0


async def _drop(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for id_ in options.ids:
            if not await client.dead_letters.drop(id_):
                raise UnknownDeadLetter(id_)
    return 0
