"""`tracewire extract`: the direction between two kinds of prompts, into the library, a file, or both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from tracewire.client import connect
from tracewire.extract.directions import METHODS
from tracewire.extract.extraction import Extraction
from tracewire.library import files
from tracewire.library.entry import LibraryEntry

from .commands import UsageError, add_command
from .model_names import add_model
from .printing import print_json, print_rows, remark

__all__ = ["add_extract", "prompts_of"]


def add_extract(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    extract = add_command(
        commands,
        "extract",
        _extract,
        parents=parents,
        help="find the direction between two kinds of prompts, and the layer that tells them apart best",
        examples=(
            "tracewire extract demo --positive code.txt --negative prose.txt --token mean --name code",
            "tracewire extract demo --positive yes.jsonl --negative no.jsonl --method logistic --to yes.safetensors",
        ),
        json="an object: model, method, at, layer, distance, scores by layer, entry (with --name), file (with --to)",
    )
    add_model(extract, help=None)
    for kind in ("positive", "negative"):
        what = "a prompt a line of a .txt file; or of a .jsonl file a text, or an object with 'prompt' or 'text'"
        extract.add_argument(f"--{kind}", type=Path, required=True, metavar="FILE", help=what)
    extract.add_argument("--method", choices=METHODS, default=METHODS[0], help=f"default: {METHODS[0]}")
    extract.add_argument(
        "--at", default="residual(*)", metavar="AT", help="the layers to compare (default: residual(*))"
    )
    extract.add_argument("--layer", type=int, metavar="N", help="use this layer, in place of the best one")
    extract.add_argument(
        "--token",
        choices=("last", "mean"),
        default="last",
        help="the last token, or the mean over tokens (default: last)",
    )
    extract.add_argument(
        "--positions", type=_span, metavar="A:B", help="the tokens that count, as 8:256 (default: all)"
    )
    extract.add_argument("--folds", type=int, default=5, metavar="N", help="folds of the cross-validation (default: 5)")
    extract.add_argument("--name", metavar="NAME", help="put the direction into the library under this name")
    extract.add_argument("--kind", choices=("vector", "probe"), default="vector", help="as what (default: vector)")
    extract.add_argument("--licence", default="", help="the licence that the entry states")
    what = f"write the direction to a file: {' or '.join(files.WRITES)}"
    extract.add_argument("--to", type=Path, metavar="FILE", help=what)
    extract.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot of the scores by layer")


def _span(text: str) -> slice:
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(*(int(part) if part else None for part in (start, stop)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, as 8:256, got {text!r}") from None


async def _extract(options: argparse.Namespace) -> int:
    if options.to is not None and options.to.suffix not in files.WRITES:
        raise UsageError(f"--to: expected a file that ends with {' or '.join(files.WRITES)}, got {options.to}")
    prompts = [prompts_of(kind, getattr(options, kind)) for kind in ("positive", "negative")]
    asked = {name: getattr(options, name) for name in ("method", "at", "layer", "token", "positions", "folds")}
    entry: LibraryEntry | None = None
    async with connect(options.url, prefix=options.prefix) as client:
        found = await client.extract(options.model, *prompts, **asked)
        arrays, said = found.entry(options.kind)
        if options.name is not None:
            entry = await client.library.put(options.name, arrays, **said, licence=options.licence)
    if options.to is not None:
        await anyio.to_thread.run_sync(partial(_write, options.to, options.name or options.to.stem, arrays, said))
    if options.plot is not None:
        options.plot.write_text(found.plot())
    _print(options, found, entry)
    return 0


def prompts_of(option: str, path: Path) -> list[Any]:
    """The prompts of the file that an option names.

    Raises:
        UsageError: the file cannot be read, or a line is no prompt.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{option}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--{option}: line {number} of {path} is no JSON: {error}") from None
        one = one.get("prompt", one.get("text")) if isinstance(one, dict) else one
        if not isinstance(one, str | list):
            raise UsageError(
                f"--{option}: line {number} of {path}: expected a text, or an object with 'prompt' or 'text'"
            )
        found.append(one)
    return found


def _write(path: Path, name: str, arrays: Any, said: dict[str, Any]) -> None:
    fields = {key: said[key] for key in ("kind", "model", "at", "provenance", "effect", "settings")}
    named = arrays if isinstance(arrays, dict) else {"vector": arrays}
    files.write(path, LibraryEntry(f"{name}@0", "", name, 0, **fields), named)


def _print(options: argparse.Namespace, found: Extraction, entry: LibraryEntry | None) -> None:
    if options.json:
        print_json(
            {
                **{name: getattr(found, name) for name in ("model", "method", "at", "layer")},
                "distance": found.direction.distance,
                "scores": [one._asdict() for one in found.scores],
                "entry": None if entry is None else entry.id,
                "file": None if options.to is None else str(options.to),
            }
        )
        return
    rows = [
        [
            one.at,
            *(f"{value:.3f}" for value in (one.auroc, one.accuracy, one.separation, one.distance)),
            _mark(one, found),
        ]
        for one in found.scores
    ]
    print_rows(("at", "auroc", "accuracy", "separation", "distance", ""), rows)
    if entry is not None:
        remark(f"{entry.id}: --steer '{found.at}@{entry.id}*{found.direction.distance:.3g}'")


def _mark(one: Any, found: Extraction) -> str:
    return "chosen" if one.at == found.at else ""
