"""What each kind of declared intervention costs at one layer, beside plain vLLM and beside requests without any.

    python -m benchmarks.kinds [--model FOLDER] [--requests 32 256] [--kinds Steer LogitLens ...] [--layer N]
        [--tokens 128] [--rounds 6] [--tap LOCATION ...] [--dummy] [--at-once] [--turns FILE] [--adapters N]
        [--subscribers N] [--model-runner second] [--beside 4] [--json]

Plain vLLM and Tracewire's engine stay up, in processes of their own, and so do the subscribers, which submit the
requests, and receive, fold and verify everything. Each keeps its client, so the engine has the arrays of a kind after
the round to warm up. `benchmarks/kind_cases.py` has the kinds.

A round has a plain round and one of requests without interventions over the bus, then `--beside` kinds, then a plain
one again, and so on. The order of the kinds turns from round to round. By number of requests and kind:

- `to_plain` is the median over the rounds of tokens a second, to the last verified result, relative to the plain round
  beside it; `least` and `most` are those of single rounds;
- `to_none` is the same relative to the round without interventions beside it;
- `made_to_plain` is from the first step to the last one;
- `p50_ms`, `p95_ms` and `p99_ms` are from the end of the step that sampled a token to the subscriber's hands.

*none* is the requests without interventions. On a GPU, `--tap` says which locations the engine serves. Kinds at other
locations are left out, and named in `untapped`; `--kinds` refuses them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import tracewire
from benchmarks.kind_cases import KINDS, Shape
from benchmarks.overhead import NAME, turn
from benchmarks.processes import at_least, show
from benchmarks.side_by_side import (
    SideBySide,
    add_options,
    described,
    engine_setup,
    figures,
    layer_count,
    measured,
    ratios,
    side_by_side,
)
from tracewire_bus.domain.intervention_checks import DeclarationError, check, decode_interventions, normalize

#: Tokens of a request that warms up: beyond the steps after which an engine records a plan's kernels.
WARM_UP = 24


async def untapped(url: str, kinds: list[str], layer: int) -> dict[str, str]:
    """The kinds that the engine does not serve, each with the reason."""
    found: dict[str, str] = {}
    async with tracewire.connect(url) as client:
        model = await client.models.get(NAME, timeout=60)
        for kind in kinds:
            declared = decode_interventions(normalize(KINDS[kind].declared(Shape(model, layer))))
            try:
                check(declared, model.tree, hidden_size=model.info.hidden_size, live={})
            except DeclarationError as error:
                if not error.field.endswith(".at"):
                    raise
                found[kind] = error.message
    return found


async def rounds_of(
    engines: SideBySide, workload: dict[str, Any], kinds: list[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The figures of each kind with so many requests."""
    #: By kind: each round, with the plain one and the one without interventions beside it.
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]] = {one: [] for one in kinds}
    without: list[tuple[dict[str, Any], dict[str, Any]]] = []
    short = {**workload, "tokens": min(WARM_UP, workload["tokens"])}
    async with turn(options.turns):
        await engines.plain_round(short)
        await engines.our_round({**short, "saves": "none"}, saves=False)
        for kind in kinds:
            await engines.our_round(of_kind(short, kind), saves=KINDS[kind].saves)
    for number in range(options.rounds):
        said: dict[str, float] = {}
        first = number * len(kinds) // options.rounds
        turned = [*kinds[first:], *kinds[:first]]
        for start in range(0, len(turned), options.beside):
            async with turn(options.turns):
                plain = await engines.plain_round(workload)
                none = await engines.our_round({**workload, "saves": "none"}, saves=False)
                without.append((none, plain))
                for kind in turned[start : start + options.beside]:
                    answer = await engines.our_round(of_kind(workload, kind), saves=KINDS[kind].saves)
                    found[kind].append((answer, plain, none))
                    said[kind] = round(ratios([answer], [plain])[0], 2)
        print(json.dumps({"requests": workload["concurrency"], "round": number + 1, **said}), file=sys.stderr)
    cells = [{"kind": "none", **compared(without)}]
    for kind, rounds in found.items():
        of_none = ratios([answer for answer, _, _ in rounds], [none for _, _, none in rounds])
        compared_to_plain = compared([(answer, plain) for answer, plain, _ in rounds])
        cells.append({"kind": kind, **compared_to_plain, "to_none": round(median(of_none), 3)})
    return [{"requests": workload["concurrency"], **one} for one in cells]


def of_kind(workload: dict[str, Any], kind: str) -> dict[str, Any]:
    """The workload with the interventions of a kind."""
    return {**workload, "saves": kind, "kind": kind}


def compared(rounds: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """The figures of rounds, each with the plain one beside it."""
    return figures([one for one, _ in rounds], [plain for _, plain in rounds])


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All kinds with all numbers of requests."""
    layer: int = options.layer
    kinds = list(dict.fromkeys(options.kinds or KINDS))
    cells: list[dict[str, Any]] = []
    async with side_by_side(options, engine_setup(options), folder, apart=True) as engines:
        left_out = await untapped(engines.url, kinds, layer)
        if left_out and options.kinds:
            raise SystemExit("\n".join(f"--kinds: {kind}: {reason}" for kind, reason in left_out.items()))
        kinds = [kind for kind in kinds if kind not in left_out]
        for requests in options.requests:
            workload = {"layers": [layer], "prompt_tokens": 16, "concurrency": requests, "tokens": options.tokens}
            workload["count_wire"] = False
            cells += await rounds_of(engines, workload, kinds, options)
    return {**described(options), "layer": layer, "untapped": left_out, "cells": cells}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, requests=[32, 256], rounds=6, settle=0.5)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--layer", type=int, help="where they are; by default in the middle")
    parser.add_argument("--beside", type=at_least(1), default=4, help="kinds behind each plain round")
    options = parser.parse_args()
    depth = layer_count(options.model)
    options.layer = depth // 2 if options.layer is None else options.layer
    if not 0 <= options.layer < depth:
        parser.error(f"--layer: expected a layer from 0 to {depth - 1}, got {options.layer}")
    show(measured(measure, options), as_json=options.json, width=12)


if __name__ == "__main__":
    main()
