"""`tracewire edits`: list, install, remove and watch a model's standing interventions."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tracewire.admin.edits import Edit, EditOutput
from tracewire.capture.intervention import Intervention
from tracewire.client import connect
from tracewire.errors import InvalidEdit

from .format import short_value

__all__ = ["add_edits"]


def add_edits(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the subcommand."""
    edits = commands.add_parser("edits", help="a model's standing interventions: list, install, remove or watch them")
    actions = edits.add_subparsers(required=True, metavar="ACTION")
    list_ = actions.add_parser("list", parents=[shared], help="list the edits in the order in which they apply")
    list_.add_argument("model", metavar="MODEL")
    list_.set_defaults(run=_list)

    install = actions.add_parser("install", parents=[shared], help="install an intervention of a Python file")
    install.add_argument("model", metavar="MODEL")
    install.add_argument("name", metavar="NAME", help="the edit's name; replaces an edit of this name")
    install.add_argument("file", metavar="FILE[:FUNCTION]", help="a Python file to execute, and the intervention in it")
    install.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="bind a variable (repeatable)")
    install.add_argument(
        "--scope",
        default="all",
        choices=("all", "default", "asked"),
        help="which requests run it: all (default), those that ask for it, or these and those that name no edits",
    )
    install.add_argument(
        "--on-error",
        default="continue",
        choices=("continue", "fail"),
        help="what happens to a request on which it raises (default: the request continues without it)",
    )
    install.add_argument(
        "--max-failures",
        type=int,
        default=10,
        metavar="N",
        help="disable it after N failures in a row on one engine (default: 10; 0: never)",
    )
    install.set_defaults(run=_install)

    remove = actions.add_parser("remove", parents=[shared], help="remove the named edits")
    remove.add_argument("model", metavar="MODEL")
    remove.add_argument("names", metavar="NAME", nargs="+")
    remove.set_defaults(run=_remove)

    watch = actions.add_parser(
        "watch", parents=[shared], help="print an edit's saves on requests that are no traces, and all of its errors"
    )
    watch.add_argument("model", metavar="MODEL")
    watch.add_argument("name", metavar="NAME")
    watch.add_argument("--since", default="now", help="'now' (default), 'start', or an item's id")
    watch.set_defaults(run=_watch)


async def _list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for edit in await client.edits(options.model).list():
            print(_edit_line(edit))
    return 0


def _edit_line(edit: Edit) -> str:
    what = [edit.block] if edit.block is not None else []
    what += [type(one).__name__ for one in edit.interventions]
    state = f"disabled: {edit.disabled}" if edit.disabled else f"on {len(edit.engines)} engines"
    problems = [f"not on {engine}: {why}" for engine, why in edit.problems.items()]
    return "\t".join((edit.name, str(edit.version), edit.scope, ", ".join(what), "; ".join((state, *problems))))


async def _install(options: argparse.Namespace) -> int:
    block = _load_intervention(options.name, options.file)
    variables = {}
    for one in options.set:
        name, _, value = one.partition("=")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            example = "--set layer=3, --set 'word=\"text\"'"
            raise InvalidEdit(options.name, "--set", f"expected NAME=JSON, as in {example}; got {one!r}") from None
    try:
        bound = block(**variables) if variables else block
    except TypeError as error:
        raise InvalidEdit(options.name, "--set", str(error)) from None
    async with connect(options.url, prefix=options.prefix) as client:
        edit = await client.edits(options.model).install(
            options.name,
            bound,
            scope=options.scope,
            on_error=options.on_error,
            max_failures=options.max_failures,
        )
        print(_edit_line(edit))
    return 0


def _load_intervention(edit: str, where: str) -> Intervention:
    """The intervention that a Python file defines. Executes the file."""
    file, colon, name = where.rpartition(":") if not Path(where).is_file() else (where, "", "")
    path = Path(file if colon else where)
    spec = importlib.util.spec_from_file_location(f"tracewire_edit_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InvalidEdit(edit, "FILE", f"expected a Python file, got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    found = {key: value for key, value in vars(module).items() if isinstance(value, Intervention)}
    if not colon and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    there = ", ".join(sorted(found)) or "none"
    asked = f"no intervention {name!r}" if colon else "several interventions, or none: name one, as FILE:FUNCTION"
    raise InvalidEdit(edit, "FILE", f"{path} has {asked} (it has: {there})")


async def _remove(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        for name in options.names:
            await client.edits(options.model).remove(name)
    return 0


async def _watch(options: argparse.Namespace) -> int:
    """Prints until it is interrupted."""
    async with connect(options.url, prefix=options.prefix) as client:
        try:
            watch = client.edits(options.model).watch(options.name, since=options.since)
        except ValueError as error:
            print(f"tracewire: {error}", file=sys.stderr)
            return 2
        async with watch:
            async for item in watch:
                print(_output_line(item), flush=True)
    return 0


def _output_line(item: EditOutput) -> str:
    more = [f"{name}={short_value(value)}" for name, value in item.saves.items()]
    if item.error is not None:
        more.append(f"{item.error.type}: {item.error.message}")
    if item.dropped:
        more.append(f"dropped: {item.dropped}")
    where = f"trace {item.trace_id}" if item.trace_id else item.request
    return "\t".join((item.id, f"version {item.version}", f"{where} {item.choice}", "  ".join(more))).rstrip()
