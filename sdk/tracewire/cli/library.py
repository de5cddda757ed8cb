"""`tracewire library`: add, list, show, export and remove the entries of the library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anyio.to_thread

from tracewire.client import connect
from tracewire.library import files
from tracewire.library.entry import LibraryEntry
from tracewire_bus.wire.library import LibraryKind

from .commands import UsageError, add_command, add_group
from .printing import place, print_json, print_rows, remark

__all__ = ["add_library"]

_ENTRY = "an object: id, kind, model, at, layers, shapes, licence, provenance, effect, digest, ..."


def add_library(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    actions = add_group(
        commands, "library", "named vectors, probes and autoencoders: add, list, show, export or remove"
    )
    _add_add(actions, parents)
    list_ = add_command(
        actions,
        "list",
        _list,
        parents=parents,
        help="list the entries with all of their versions",
        json=f"a list of objects, each as {_ENTRY.removeprefix('an ')}",
    )
    list_.add_argument("--tenant", default="", help="the entries of this tenant, before the shared ones")
    show = add_command(
        actions, "show", _show, parents=parents, help="show an entry, and all versions of its name", json=_ENTRY
    )
    show.add_argument("name", metavar="NAME", help="calm, calm@3, or TENANT:calm")
    export = add_command(
        actions,
        "export",
        _export,
        parents=parents,
        help="write an entry to a file: safetensors, or a GGUF control vector",
        examples=("tracewire library export calm@3 --to calm.gguf",),
        json="an object: id, file",
    )
    export.add_argument("name", metavar="NAME")
    what = f"the file; its end gives the format: {' or '.join(files.WRITES)}"
    export.add_argument("--to", type=Path, required=True, metavar="FILE", help=what)
    remove = add_command(
        actions,
        "remove",
        _remove,
        parents=parents,
        help="remove versions (calm@3), or names with all of their versions (calm)",
        json="a list of the ids that were removed",
    )
    remove.add_argument("names", metavar="NAME", nargs="+")


def _add_add(actions: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    add = add_command(
        actions,
        "add",
        _add,
        parents=parents,
        help="put a file, or a folder of the hub's, into the library as the next version of a name",
        examples=(
            "tracewire library add calm direction.npy --model demo --at 'residual(4)' --licence MIT",
            "tracewire library add honest honesty.gguf --model mistral",
        ),
        json=_ENTRY,
    )
    add.add_argument(
        "name", metavar="NAME", help="1 to 64 letters, digits, '.', '_' or '-'; TENANT:NAME for a tenant's"
    )
    what = f"a file that ends with {', '.join(files.READS)}, or a folder with one, or with an autoencoder of SAELens"
    add.add_argument("file", metavar="FILE", type=Path, help=what)
    add.add_argument("--kind", choices=get_args(LibraryKind), help="what it is (default: by the file)")
    add.add_argument("--model", help="name of its model (default: as the file says, else any)")
    add.add_argument("--at", metavar="AT", help="its location, as 'residual(4)' (default: as the file says, else any)")
    add.add_argument("--licence", help="the licence's name (default: as the file says)")
    add.add_argument("--description", help="what it is")
    for name in ("provenance", "effect"):
        what = "how it was made" if name == "provenance" else "what was measured"
        add.add_argument(
            f"--{name}", action="append", default=[], metavar="KEY=VALUE", help=f"{what}; a number or text (repeatable)"
        )
    add.add_argument("--replacing", type=int, metavar="N", help="the version that must be the newest; 0 for none")


async def _add(options: argparse.Namespace) -> int:
    found = await anyio.to_thread.run_sync(partial(files.read, options.file))
    said = dict(found.options)
    for name in ("kind", "model", "at", "licence", "description"):
        if getattr(options, name) is not None:
            said[name] = getattr(options, name)
    for name in ("provenance", "effect"):
        said[name] = {**said.get(name, {}), **dict(_pair(name, text) for text in getattr(options, name))}
    async with connect(options.url, prefix=options.prefix) as client:
        entry = await client.library.put(options.name, found.arrays, **said, replacing=options.replacing)
    _print(entry, options.json)
    return 0


def _pair(option: str, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--{option}: expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


async def _list(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        found = await client.library.list(options.tenant)
        url = client.url
    if options.json:
        print_json([_json(one) for one in found])
        return 0
    if not found:
        remark(f"No entries on {place(url, options.prefix)}. Add one: tracewire library add --help")
    print_rows(("entry", "kind", "model", "at", "shape", "licence", "by"), [_row(one) for one in found])
    return 0


async def _show(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        entry = await client.library.get(options.name)
        versions = await client.library.history(entry.id)
    if options.json:
        print_json({**_json(entry), "versions": [_json(one) for one in versions]})
        return 0
    for name, value in _json(entry).items():
        if value not in ("", None, {}, []):
            print(f"{name}: {json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value}")
    for one in versions:
        if one.removed is not None:
            print(f"removed: {one.id}, by {one.removed_by} at {_time(one.removed)}")
    return 0


async def _export(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        entry = await client.library.get(options.name)
        arrays = await client.library.load(entry.id)
    await anyio.to_thread.run_sync(partial(files.write, options.to, entry, arrays))
    if options.json:
        print_json({"id": entry.id, "file": str(options.to)})
    else:
        print(f"{options.to}: {entry.id}")
    return 0


async def _remove(options: argparse.Namespace) -> int:
    async with connect(options.url, prefix=options.prefix) as client:
        removed = [id_ for name in options.names for id_ in await client.library.remove(name)]
    if options.json:
        print_json(removed)
    else:
        print("\n".join(f"removed {id_}" for id_ in removed))
    return 0


def _print(entry: LibraryEntry, as_json: bool) -> None:
    if as_json:
        print_json(_json(entry))
    else:
        print("\t".join(_row(entry)))


def _row(entry: LibraryEntry) -> list[str]:
    layers = f"layers {entry.layers[0]} to {entry.layers[-1]}" if entry.layers else ""
    shape = next(iter(entry.shapes.values()), ())
    return [
        *(entry.id, entry.kind, entry.model or "any", entry.at or layers or "any"),
        *("x".join(map(str, shape)), entry.licence, entry.by),
    ]


def _json(entry: LibraryEntry) -> dict[str, Any]:
    found = {name: getattr(entry, name) for name in entry.__struct_fields__}
    shapes = {name: list(shape) for name, shape in entry.shapes.items()}
    return {**found, "layers": list(entry.layers), "shapes": shapes}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
