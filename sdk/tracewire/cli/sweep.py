"""`tracewire sweep`: strengths of a vector with a score of each, and patches over layers and positions."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracewire.client import connect
from tracewire.errors import TraceRejected, UnknownOption
from tracewire.extract.sweep import Score, StrengthSweep
from tracewire.patch_sweep import PatchSweep
from tracewire_bus.wire.messages import Probe, Steer

from .blocks import load_function
from .commands import UsageError, add_command, add_group, positive
from .extract import prompts_of
from .model_names import add_model
from .printing import print_json, print_matrix, print_rows
from .requests import add_sampling, prompt_of, sampling_of
from .specs import PROBE, STEER, numbers, probe_spec, steer_spec

__all__ = ["add_sweep"]

#: Of a score: a probe, or a function in a file.
_SCORE = "AT[@VECTOR]|FILE.py::NAME"


def add_sweep(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommands."""
    actions = add_group(commands, "sweep", "run a prompt many times: at several strengths, or with each value patched")
    _add_strengths(actions, parents)
    _add_patch(actions, parents)


def _add_strengths(actions: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    parser = add_command(
        actions,
        "strengths",
        _strengths,
        parents=parents,
        help="steer prompts by a vector at several strengths, and score what the model writes",
        examples=(
            "tracewire sweep strengths demo --prompt 'This module' --steer 'residual(4)@code' --strengths=-20,0,20 "
            "--score 'residual(6)@code.npy' --plot strengths.svg",
            "tracewire sweep strengths demo --prompts prompts.txt --steer 'residual(4)@code.npy' --strengths 0,10,20 "
            "--score score.py::is_code --json",
        ),
        json="an object: at, best, and rows of strength, score, perplexity, scores and texts by prompt",
    )
    add_model(parser, help=None)
    add = parser.add_argument
    what = "a prompt (repeatable); - reads one from standard input"
    add("--prompt", action="append", default=[], metavar="TEXT", help=what)
    what = "prompts: one a line of a .txt file; or of a .jsonl file a text, or an object with 'prompt' or 'text'"
    add("--prompts", type=Path, metavar="FILE", help=what)
    what = f"where to add which vector: '{STEER[1].partition('*')[0]}'; VECTOR is a file or a name of the library"
    add("--steer", type=steer_spec, required=True, metavar="AT@VECTOR", help=what)
    what = "factors of the vector, as --strengths=-20,0,20"
    add("--strengths", type=numbers, required=True, metavar="N,N,...", help=what)
    what = f"a probe ('{PROBE[1].partition('=')[2]}'), or a function of a text in a Python file, which is executed"
    add("--score", required=True, metavar=_SCORE, help=what)
    add("--no-perplexity", action="store_true", help="leave out the unsteered model's perplexity of the texts")
    add("--most-perplexity", type=float, default=math.inf, metavar="N", help="of the best strength (default: any)")
    add("--texts", action="store_true", help="print what the model wrote at each strength")
    add("--plot", type=Path, metavar="FILE.svg", help="write a plot of the scores by strength")
    add("--concurrency", type=positive, default=32, metavar="N", help="traces that run at once (default: 32)")
    add_sampling(parser, live=False)


def _add_patch(actions: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    parser = add_command(
        actions,
        "patch",
        _patch,
        parents=parents,
        help="put each layer's and position's value of one prompt into another, and measure the next token",
        examples=("tracewire sweep patch demo 'import os\\n\\nos.' 'import re\\n\\nre.' --token path --against sub",),
        json="an object: layers, positions, tokens, values and normalized (by layer and position), clean, corrupted",
    )
    add_model(parser, help=None)
    parser.add_argument("clean", metavar="CLEAN", help="the prompt whose values are taken; - reads standard input")
    parser.add_argument("corrupted", metavar="CORRUPTED", help="the prompt into which they are put")
    add = parser.add_argument
    what = "the next token whose log-probability counts: its text, or its id"
    add("--token", required=True, metavar="TOKEN", help=what)
    add("--against", metavar="TOKEN", help="less the log-probability of this one")
    add("--layers", default="*", metavar="A:B", help="an index, indices (1,4), or a slice as 4:12 (default: all)")
    add("--positions", default="prompt", metavar="A:B", help="likewise of the prompt's positions (default: all)")
    add("--at", default="residual({layer})", metavar="AT", help="default: residual({layer})")
    add("--raw", action="store_true", help="print the measure itself, and not 0 as CORRUPTED to 1 as CLEAN")
    add("--concurrency", type=positive, default=32, metavar="N", help="traces that run at once (default: 32)")


# --- strengths --------------------------------------------------------------------------------------------------------


async def _strengths(options: argparse.Namespace) -> int:
    steer = options.steer.one
    assert isinstance(steer, Steer)
    if steer.scale != 1.0 or steer.positions != "all":
        raise UsageError("--steer: the strengths are the factors: expected AT@VECTOR, without a factor or positions")
    prompts = [*map(prompt_of, options.prompt), *(prompts_of("prompts", options.prompts) if options.prompts else ())]
    if not prompts:
        raise UsageError("expected --prompt TEXT, or --prompts FILE")
    given: dict[str, Any] = {**sampling_of(options), "at": steer.at, "concurrency": options.concurrency}
    given["perplexity"] = not options.no_perplexity
    score = _score(options.score)
    async with connect(options.url, prefix=options.prefix) as client:
        try:
            found = await client.strength_sweep(
                options.model, steer.vector, prompts, options.strengths, score=score, **given
            )
        except* UnknownOption as errors:
            raise UsageError(f"--sampling {_first(errors).message}") from None
        except* TraceRejected as errors:
            error = _first(errors)
            named = {"interventions[0]": "--steer", "interventions[1]": "--score"}.get(error.field.partition(".")[0])
            raise (UsageError(f"{named}: {error.message}") if named else error) from None
    if options.plot is not None:
        options.plot.write_text(found.plot())
    _print_strengths(options, steer.at, found)
    return 0


def _first(errors: BaseExceptionGroup[Any]) -> Any:
    found: Any = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _score(text: str) -> Score:
    if "::" in text:
        try:
            function: Score = load_function(text)
        except (OSError, ValueError) as error:
            raise UsageError(f"--score: {error}") from None
        return function
    try:
        probe = probe_spec(text).one
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--score: {error}") from None
    assert isinstance(probe, Probe)
    if probe.weight is None and probe.reduce == "none":
        raise UsageError(f"--score: expected a probe of a number, as {PROBE[1].partition('=')[2]}, got {text!r}")
    probe.name = probe.name or "score"
    return probe


def _print_strengths(options: argparse.Namespace, at: str, found: StrengthSweep) -> None:
    measured = [row for row in found.rows if not row.perplexity > options.most_perplexity]
    best = found.best(options.most_perplexity).strength if measured else None
    if options.json:
        rows = [
            {
                **{name: getattr(row, name) for name in ("strength", "score", "scores", "texts")},
                "perplexity": None if math.isnan(row.perplexity) else row.perplexity,
            }
            for row in found.rows
        ]
        print_json({"at": at, "best": best, "rows": rows})
        return
    table = [
        [
            f"{row.strength:g}",
            f"{row.score:.4g}",
            "" if math.isnan(row.perplexity) else f"{row.perplexity:.4g}",
            "best" if row.strength == best else "",
            *([" | ".join(text.replace("\n", "\\n") for text in row.texts)] if options.texts else ()),
        ]
        for row in found.rows
    ]
    print_rows(("strength", "score", "perplexity", "", *(["texts"] if options.texts else ())), table)


# --- patches ----------------------------------------------------------------------------------------------------------


async def _patch(options: argparse.Namespace) -> int:
    token = _token(options.token)
    metric = token if options.against is None else (token, _token(options.against))
    async with connect(options.url, prefix=options.prefix) as client:
        try:
            found = await client.patch_sweep(
                options.model,
                *map(prompt_of, (options.clean, options.corrupted)),
                metric=metric,
                layers=_places(options.layers),
                positions=_places(options.positions),
                at=options.at,
                concurrency=options.concurrency,
            )
        except TraceRejected as error:
            name = {"metric": "--token", "layers": "--layers", "positions": "--positions", "at": "--at"}
            if error.field in name:
                raise UsageError(f"{name[error.field]}: {error.message}") from None
            raise
    _print_patches(options, found)
    return 0


def _token(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _places(text: str) -> str | int | list[int]:
    """An index, several with commas, or a slice or a name, as the client takes them."""
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        return text
    return found if len(found) > 1 else found[0]


def _print_patches(options: argparse.Namespace, found: PatchSweep) -> None:
    differ = found.clean != found.corrupted
    if options.json:
        print_json(
            {
                **{name: getattr(found, name) for name in ("clean", "corrupted", "layers", "positions", "tokens")},
                "values": found.values.tolist(),
                "normalized": found.normalized.tolist() if differ else None,
                **{name: getattr(found, name) for name in ("traces", "seconds")},
            }
        )
        return
    raw = options.raw or not differ
    # A prompt may have more positions than a terminal has columns.
    rows = [f"{position} {_shown(token)}" for position, token in zip(found.positions, found.tokens, strict=True)]
    values = found.values if raw else found.normalized
    print_matrix("position", rows, [str(layer) for layer in found.layers], values.T)
    print_rows(("", "measure"), [["clean", f"{found.clean:.4g}"], ["corrupted", f"{found.corrupted:.4g}"]])


def _shown(token: str) -> str:
    return token.replace("\n", "\\n").replace("\t", "\\t").strip(" ") or "·"
