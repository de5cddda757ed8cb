"""`tracewire edits`: list, install, remove and watch a model's standing interventions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tracewire.admin.edits import Edit, EditOutput
from tracewire.capture.intervention import Intervention
from tracewire.client import connect
from tracewire.errors import InvalidEdit

from .blocks import BLOCK, load_block
from .commands import UsageError, add_command, add_group
from .format import counted, short_value
from .model_names import add_model
from .printing import no_engines, place, print_json, print_json_line, print_rows, remark
from .requests import add_interventions, specs_of
from .specs import declared

__all__ = ["add_edits"]


def add_edits(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    actions = add_group(commands, "edits", "a model's standing interventions: list, install, remove or watch them")
    list_ = add_command(
        actions,
        "list",
        _list,
        parents=parents,
        help="list the edits in the order in which they apply",
        json="a list of objects: name, version, scope, block, interventions, disabled, engines, problems, ...",
    )
    add_model(list_, help=None)
    _add_install(actions, parents)
    remove = add_command(actions, "remove", _remove, parents=parents, help="remove the named edits")
    add_model(remove, help=None)
    remove.add_argument("names", metavar="NAME", nargs="+")
    watch = add_command(
        actions,
        "watch",
        _watch,
        parents=parents,
        help="print an edit's saves on requests that are no traces, and all of its errors",
        json="each item as a JSON object on a line",
    )
    add_model(watch, help=None)
    watch.add_argument("name", metavar="NAME")
    watch.add_argument("--since", default="now", help="'now' (default), 'start', or an item's id")


def _add_install(actions: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    install = add_command(
        actions,
        "install",
        _install,
        parents=parents,
        help="install an intervention of a Python file, declared interventions, or both",
        examples=(
            "tracewire edits install demo calm --steer 'residual(4)@direction.npy*-4'",
            "tracewire edits install demo norms probes.py::norms --set layer=3 --scope asked",
        ),
        json="the edit as an object, as list prints it",
    )
    add_model(install, help=None)
    install.add_argument("name", metavar="NAME", help="the edit's name; replaces an edit of this name")
    what = "a Python file to execute, and the intervention in it"
    install.add_argument("file", metavar=BLOCK, nargs="?", help=what)
    add_interventions(install, block=False)
    what = "bind a variable of the file's intervention (repeatable)"
    install.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help=what)
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


async def _list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        edits = await client.edits(options.model).list()
        served = [info.name for info in await client.models.list()]
        url = client.url
    if options.json:
        print_json([_edit_json(edit) for edit in edits])
        return 0
    if not edits:
        where = place(url, options.prefix)
        remark(f"No edits of {options.model!r} on {where}. Install one: tracewire edits install --help")
    if options.model not in served:
        no_engines(url, options.prefix, options.model, served)
    print_rows(("name", "version", "scope", "what", "state"), [_edit_row(edit) for edit in edits])
    return 0


def _edit_row(edit: Edit) -> list[str]:
    what = [edit.block] if edit.block is not None else []
    what += [type(one).__name__ for one in edit.interventions]
    state = f"disabled: {edit.disabled}" if edit.disabled else f"on {counted(len(edit.engines), 'engine')}"
    problems = [f"not on {engine}: {why}" for engine, why in edit.problems.items()]
    return [edit.name, str(edit.version), edit.scope, ", ".join(what), "; ".join((state, *problems))]


def _edit_json(edit: Edit) -> dict[str, Any]:
    found = {name: getattr(edit, name) for name in edit.__struct_fields__}
    return {**found, "engines": list(edit.engines), "interventions": [repr(one) for one in edit.interventions]}


async def _install(options: argparse.Namespace) -> int:
    found = declared(specs_of(options), {})
    if found.live:
        raise UsageError("an edit has no live parameters: give --steer a number as its factor")
    block = _bound(options) if options.file is not None else None
    if block is None and options.set:
        raise UsageError("--set binds a variable of a block: name the file")
    if block is None and not found.interventions:
        raise UsageError("nothing to install: give FILE.py::NAME, --steer, --probe or --lens")
    async with connect(options.url, prefix=options.prefix) as client:
        edit = await client.edits(options.model).install(
            options.name,
            block,
            interventions=found.interventions,
            scope=options.scope,
            on_error=options.on_error,
            max_failures=options.max_failures,
        )
    if options.json:
        print_json(_edit_json(edit))
    else:
        print("\t".join(_edit_row(edit)))
    return 0


def _bound(options: argparse.Namespace) -> Intervention:
    """The intervention of the file, with the variables of `--set`."""
    try:
        block = load_block(options.file)
    except ValueError as error:
        raise InvalidEdit(options.name, "FILE", str(error)) from None
    variables = {}
    for one in options.set:
        name, _, value = one.partition("=")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            example = "--set layer=3, --set 'word=\"text\"'"
            raise InvalidEdit(options.name, "--set", f"expected NAME=JSON, as in {example}; got {one!r}") from None
    try:
        return block(**variables) if variables else block
    except TypeError as error:
        raise InvalidEdit(options.name, "--set", str(error)) from None


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
            raise UsageError(str(error)) from None
        async with watch:
            async for item in watch:
                if options.json:
                    print_json_line(_output_json(item))
                else:
                    print(_output_line(item), flush=True)
    return 0


def _output_json(item: EditOutput) -> dict[str, Any]:
    # Imported here: only JSON needs them.
    from tracewire.gateway.event_json import failure_json
    from tracewire.gateway.json_values import to_json

    found = {name: getattr(item, name) for name in item.__struct_fields__}
    return {**found, "saves": to_json(item.saves, "list", item.trace_id), "error": failure_json(item.error)}


def _output_line(item: EditOutput) -> str:
    more = [f"{name}={short_value(value)}" for name, value in item.saves.items()]
    if item.error is not None:
        more.append(f"{item.error.type}: {item.error.message}")
    if item.dropped:
        more.append(f"dropped: {item.dropped}")
    where = f"trace {item.trace_id}" if item.trace_id else item.request
    return "\t".join((item.id, f"version {item.version}", f"{where} {item.choice}", "  ".join(more))).rstrip()
