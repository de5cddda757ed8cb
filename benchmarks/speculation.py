"""Plain requests with speculative decoding: on Tracewire's engine and on plain vLLM with the same drafts, in one run.

    python -m benchmarks.speculation [--model FOLDER] [--drafts 3] [--concurrency 16]
    [--tokens 100] [--rounds 5] [--dummy] [--undrafted] [--declared] [--first-runner] [--json]

Engines in processes of their own take turns with the same requests, greedily: *plain*, a stock `AsyncLLM`, and *own*,
Tracewire's engine without the bus, both with drafts; and with `--undrafted` *undrafted*, a stock `AsyncLLM` without.
Drafts come from n-grams. Tracewire's engine is eager here, so the others are, too.

`own_to_plain` is the ratio of their tokens a second in each round: the median, the least and the most. `acceptance` is
the part of the drafted tokens that was taken, of all rounds. `equal` says whether all engines had the same tokens.
`drafted_to_undrafted` is *plain* to *undrafted*.

With `--declared` two of Tracewire's engines over the bus take turns instead, one with drafts and one without, with
traces that steer and read at one layer. `declared_to_undrafted` is the ratio of their tokens a second at the client.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.overhead import SETTLE_S, Role, start_engine, tracewire_round
from benchmarks.processes import at_least, show
from tracewire_bus.transport.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]


def drafting(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's options of speculative decoding."""
    return {
        "method": "ngram",
        "num_speculative_tokens": options.drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def started(options: argparse.Namespace, folder: Path) -> dict[str, Role]:
    """The engines, by name."""
    engine: dict[str, Any] = {
        "max_num_seqs": options.concurrency,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": options.kv_bytes,
    }
    if options.dummy:
        engine |= {"load_format": "dummy", "gpu_memory_utilization": 0.1}
    common: dict[str, Any] = {"model": options.model, "engine": engine, "taps": [], "eager": True}
    common["first_runner"] = options.first_runner
    drafted = {**common, "engine": {**engine, "speculative_config": drafting(options)}}
    kinds = {"plain": ("plain", drafted), "own": ("own", drafted)}
    if options.undrafted:
        kinds["undrafted"] = ("plain", common)
    roles: dict[str, Role] = {}
    try:
        for name, (kind, given) in kinds.items():
            roles[name] = Role(kind, given, folder, name)
    except BaseException:
        stop(roles)
        raise
    return roles


def stop(roles: dict[str, Role]) -> None:
    """End the engines."""
    for role in roles.values():
        role.stop()


def spread(ratios: list[float]) -> dict[str, float]:
    """The median, the least and the most of the rounds' ratios."""
    return {
        "median": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }


def summed(rounds: list[dict[str, dict[str, Any]]], before: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of all rounds: by engine, what each came to in each; `before` is a round that does not count."""
    speeds = {name: [one[name]["tokens"] / one[name]["seconds"] for one in rounds] for name in rounds[0]}
    acceptance = {}
    for name in ("plain", "own"):
        # The engines count from their start.
        drafted, taken = (rounds[-1][name][count] - before[name][count] for count in ("drafted", "taken"))
        acceptance[name] = round(taken / drafted, 3) if drafted else 0.0
    found: dict[str, Any] = {
        "tokens_per_second": {name: round(median(one), 1) for name, one in speeds.items()},
        "own_to_plain": spread([own / plain for own, plain in zip(speeds["own"], speeds["plain"], strict=True)]),
        "acceptance": acceptance,
        "equal": len({one[name]["digest"] for one in rounds for name in one}) == 1,
    }
    if "undrafted" in speeds:
        pairs = zip(speeds["plain"], speeds["undrafted"], strict=True)
        found["drafted_to_undrafted"] = spread([drafted / undrafted for drafted, undrafted in pairs])
    return found


async def declared(options: argparse.Namespace, folder: Path, workload: dict[str, Any]) -> dict[str, Any]:
    """The figures of traces that steer and read, with drafts and without."""
    engine = {"max_num_seqs": options.concurrency, "max_model_len": 2048, "kv_cache_memory_bytes": options.kv_bytes}
    arguments = {"drafted": ["--speculative-config", json.dumps(drafting(options))], "undrafted": []}
    workload = {**workload, "saves": "steered", "layers": [2], "count_wire": False}
    speeds: dict[str, list[float]] = {name: [] for name in arguments}
    engines: dict[str, subprocess.Popen[str]] = {}
    async with EmbeddedServer.start() as one, EmbeddedServer.start() as other:
        urls = {"drafted": one.url, "undrafted": other.url}
        try:
            for name, given in arguments.items():
                setup = {"model": options.model, "engine": engine, "taps": [], "arguments": given}
                place = folder / name
                place.mkdir()
                engines[name] = await anyio.to_thread.run_sync(start_engine, urls[name], setup, place)
            for number in range(options.rounds + 1):
                for name in list(urls)[:: 1 if number % 2 else -1]:
                    await anyio.sleep(SETTLE_S)
                    found = await tracewire_round(urls[name], workload)
                    # The first round does not count.
                    speeds[name] += [found["tokens"] / found["seconds"]] if number else []
        finally:
            for process in engines.values():
                process.terminate()
            for process in engines.values():
                process.wait(60)
    pairs = zip(speeds["drafted"], speeds["undrafted"], strict=True)
    return {
        "tokens_per_second": {name: round(median(one), 1) for name, one in speeds.items()},
        "declared_to_undrafted": spread([drafted / undrafted for drafted, undrafted in pairs]),
    }


def side_by_side(options: argparse.Namespace, folder: Path, workload: dict[str, Any]) -> dict[str, Any]:
    """The figures of plain requests."""
    roles = started(options, folder)
    try:
        before = {name: role.run(workload) for name, role in roles.items()}
        rounds = []
        for number in range(options.rounds):
            # Whoever is first in one round is last in the next.
            order = list(roles.items())[:: 1 if number % 2 else -1]
            rounds.append({name: role.run(workload) for name, role in order})
    finally:
        stop(roles)
    return summed(rounds, before)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo_model" / "model"), help="a model's folder")
    parser.add_argument("--drafts", type=at_least(1), default=3, help="how many tokens are drafted for a step")
    parser.add_argument("--concurrency", type=at_least(1), default=16, help="how many requests a round has")
    parser.add_argument("--tokens", type=at_least(2), default=100, help="how many tokens each generates")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=32, help="how many tokens each prompt has")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--kv-bytes", type=at_least(1), default=256 << 20, help="the KV cache of each engine")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--undrafted", action="store_true", help="a stock engine without drafts, too")
    parser.add_argument("--declared", action="store_true", help="traces with interventions, with drafts and without")
    parser.add_argument("--first-runner", action="store_true", help="the stock engines use vLLM's first model runner")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    workload = {
        "concurrency": options.concurrency,
        "tokens": options.tokens,
        "prompt_tokens": options.prompt_tokens,
        "saves": "none",
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.declared:
            found = anyio.run(declared, options, Path(folder), workload)
        else:
            found = side_by_side(options, Path(folder), workload)
    figures = {
        "method": drafting(options)["method"],
        "drafts": options.drafts,
        **workload,
        "rounds": options.rounds,
        **found,
    }
    show(figures, as_json=options.json, width=22)


if __name__ == "__main__":
    main()
