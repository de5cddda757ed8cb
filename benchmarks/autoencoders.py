"""What an autoencoder costs that tensor-parallel ranks split, beside one that each of them has whole.

    python -m benchmarks.autoencoders [--ranks 2] [--features 65536] [--requests 1 8] [--tokens 64] [--rounds 7]
                                      [--architecture relu] [--json]

One engine of so many ranks serves the demo model. It has two autoencoders, one of which has a few features more, and is
split. Rounds of requests that read with either, or with none, take turns. By number of requests and what is read,

- `split_to_whole` is the median over the rounds of tokens a second with the split one, relative to the whole one in the
  same round; `least` and `most` are those of single rounds;
- `split_to_none` and `whole_to_none` are the same relative to the requests without interventions.

`chosen` reads three features, `greatest` the 16 greatest of all, `steered` changes three features.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np

import tracewire
from benchmarks.processes import at_least, show, start
from tracewire import Client, Features, SparseAutoencoder, SteerFeatures
from tracewire_bus.transport.embedded import EmbeddedServer

WIDTH, AT, K = 256, "residual(4)", 32
CHOSEN = [1, 7, 30]
KINDS: dict[str, Callable[[str], Any]] = {
    "chosen": lambda sae: Features("found", AT, sae, indices=CHOSEN),
    "greatest": lambda sae: Features("found", AT, sae, top_k=16),
    "steered": lambda sae: SteerFeatures(AT, sae, CHOSEN, scale=0.5, add=0.1),
}


def make(folder: Path, features: int, architecture: str) -> str:
    """An autoencoder in that folder, by the option that gives it to an engine."""
    rng = np.random.default_rng(1)
    encoder, decoder = (rng.standard_normal((2, features, WIDTH), np.float32) / np.float32(WIDTH**0.5)).astype(
        np.float32
    )
    more: dict[str, Any] = {"k": K} if architecture == "topk" else {}
    SparseAutoencoder(encoder, decoder, architecture=architecture, **more).save(folder)
    return f"{folder.name}={folder}"


async def speed(client: Client, interventions: list[Any], requests: int, tokens: int) -> float:
    """Tokens a second of so many requests at once, to their last results."""

    async def one() -> None:
        options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        await client.trace("demo", "def parse(text):", interventions=interventions, **options).result()

    begun = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(requests):
            group.start_soon(one)
    return requests * tokens / (time.monotonic() - begun)


async def compare(client: Client, kind: str, requests: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one kind with so many requests."""
    made = {"none": [], "whole": [KINDS[kind]("whole")], "split": [KINDS[kind]("split")]}
    found: dict[str, list[float]] = {name: [] for name in made}
    for one in made.values():
        await speed(client, one, requests, 12)
    for number in range(options.rounds):
        for name in sorted(made, reverse=number % 2 == 1):
            found[name].append(await speed(client, made[name], requests, options.tokens))
    rounds = {
        f"{one}_to_{other}": [mine / its for mine, its in zip(found[one], found[other], strict=True)]
        for one, other in (("split", "whole"), ("split", "none"), ("whole", "none"))
    }
    figures = {name: median(one) for name, one in rounds.items()}
    figures |= {"least": min(rounds["split_to_whole"]), "most": max(rounds["split_to_whole"])}
    return {name: round(one, 3) for name, one in figures.items()}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    # On CPUs, vLLM finds no cores for several ranks by itself.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(options.ranks))))
    with tempfile.TemporaryDirectory() as folder:
        saes = [
            make(Path(folder, name), count, options.architecture)
            for name, count in (("whole", options.features), ("split", options.features + options.ranks))
        ]
        # That of the whole one: its rows, and its biases.
        size = 8 * WIDTH * options.features + 4 * (options.features + WIDTH)
        async with EmbeddedServer.start() as server:
            engine = start(
                *("tracewire.cli", "engine", "demo", "--url", server.url, "--code", "any"),
                *("--tensor-parallel-size", str(options.ranks), "--max-num-seqs", str(max(options.requests))),
                *("--capacity", str(max(options.requests)), "--sae", saes[0], "--sae", saes[1]),
                *("--sae-bytes", str(2 * size), "--sae-split-bytes", str(size)),
            )
            try:
                async with tracewire.connect(server.url) as client:
                    await client.models.get("demo", timeout=120)
                    return {
                        f"{kind}, {requests} requests": await compare(client, kind, requests, options)
                        for requests in options.requests
                        for kind in KINDS
                    }
            finally:
                engine.terminate()
                engine.wait()


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of the engine, with a device each")
    parser.add_argument("--features", type=at_least(64), default=65536)
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=at_least(8), default=64)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--architecture", choices=("relu", "topk"), default="relu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(anyio.run(run, options), as_json=options.json, width=24)
    return 0


if __name__ == "__main__":
    sys.exit(main())
