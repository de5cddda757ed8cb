"""`tracewire extract`: the direction between two kinds of prompts, into the library, a file, or both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread

from tracewire.client import Client, connect
from tracewire.extract.directions import METHODS
from tracewire.extract.extraction import Extraction
from tracewire.extract.sweep import StrengthSweep
from tracewire.library import files
from tracewire.library.entry import LibraryEntry
from tracewire_bus.wire.messages import Probe

from .blocks import load_function
from .commands import UsageError, add_command
from .model_names import add_model
from .printing import print_json, print_rows, remark
from .specs import numbers

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
            "tracewire extract demo --positive code.txt --negative prose.txt --strengths=-20,0,20 --prompts starts.txt",
        ),
        json="an object: model, method, at, layer, distance, scores by layer, entry (with --name), file (with --to), "
        "sweep: strength, score and perplexity each",
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
    sweep = extract.add_argument_group("a sweep of strengths")
    sweep.add_argument(
        "--strengths", type=numbers, metavar="S,S", help="steer at each of these strengths, as --strengths=-20,0,20"
    )
    sweep.add_argument("--prompts", type=Path, metavar="FILE", help="the prompts to steer; a file as --positive")
    what = "a function of a text that returns a number (default: the direction as a probe, one layer later)"
    sweep.add_argument("--score", metavar="FILE.py::NAME", help=what)
    sweep.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens of each text (default: 64)")
    what = "write a plot of the score and the perplexity by strength"
    sweep.add_argument("--sweep-plot", type=Path, metavar="FILE.svg", help=what)


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
    sweeps, score = _sweep_inputs(options)
    entry: LibraryEntry | None = None
    sweep: StrengthSweep | None = None
    async with connect(options.url, prefix=options.prefix) as client:
        found = await client.extract(options.model, *prompts, **asked)
        arrays, said = found.entry(options.kind)
        if options.name is not None:
            entry = await client.library.put(options.name, arrays, **said, licence=options.licence)
        if sweeps:
            along = score or await _later(client, options.model, found)
            sweep = await client.strength_sweep(
                options.model, found, sweeps, options.strengths, score=along, max_tokens=options.max_tokens
            )
    if options.to is not None:
        await anyio.to_thread.run_sync(partial(_write, options.to, options.name or options.to.stem, arrays, said))
    if options.plot is not None:
        options.plot.write_text(found.plot())
    if sweep is not None and options.sweep_plot is not None:
        options.sweep_plot.write_text(sweep.plot())
    _print(options, found, entry, sweep)
    return 0


def _sweep_inputs(options: argparse.Namespace) -> tuple[list[Any], Callable[[str], float] | None]:
    """The prompts of the sweep, none without one, and the function that scores a text."""
    if options.strengths is None:
        for name in ("prompts", "score", "sweep_plot"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')}: expected --strengths with it")
        return [], None
    if options.prompts is None:
        raise UsageError("--strengths: expected --prompts with it, the prompts to steer")
    prompts = prompts_of("prompts", options.prompts)
    if not prompts:
        raise UsageError(f"--prompts: {options.prompts} has no prompt")
    if options.score is None:
        return prompts, None
    try:
        function: Callable[[str], float] = load_function(options.score)
    except ValueError as error:
        raise UsageError(f"--score: {error}") from None
    return prompts, function


async def _later(client: Client, model: str, found: Extraction) -> Probe:
    """The direction as a probe of the next layer: at its own it would see the vector that is added."""
    if found.layer is None:
        raise UsageError(f"--score: expected FILE.py::NAME, since {found.at} has no next layer")
    last = (await client.models.get(model)).info.layer_count - 1
    return Probe("score", f"residual({min(found.layer + 1, last)})", weight=found.vector)


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


def _print(
    options: argparse.Namespace, found: Extraction, entry: LibraryEntry | None, sweep: StrengthSweep | None
) -> None:
    steered = [] if sweep is None else sweep.rows
    if options.json:
        print_json(
            {
                **{name: getattr(found, name) for name in ("model", "method", "at", "layer")},
                "distance": found.direction.distance,
                "scores": [one._asdict() for one in found.scores],
                "entry": None if entry is None else entry.id,
                "file": None if options.to is None else str(options.to),
                "sweep": [
                    {"strength": row.strength, "score": row.score, "perplexity": row.perplexity} for row in steered
                ],
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
    if steered:
        rows = [[f"{row.strength:g}", f"{row.score:.3f}", f"{row.perplexity:.2f}"] for row in steered]
        print_rows(("strength", "score", "perplexity"), rows)
    if entry is not None:
        remark(f"{entry.id}: --steer '{found.at}@{entry.id}*{found.direction.distance:.3g}'")


def _mark(one: Any, found: Extraction) -> str:
    return "chosen" if one.at == found.at else ""
