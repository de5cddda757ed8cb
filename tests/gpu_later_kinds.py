"""What only a GPU shows of conditions, controllers, features, lenses and subspaces: CUDA graphs.

    python -m tests.gpu_later_kinds --model FOLDER [--layer 3] [--model-runner second]

Starts an engine with CUDA graphs and taps at all layers, then an eager one, with dummy weights, and prints one JSON
object, by kind: `apart`, the greatest relative difference of what both read, and `tokens`, whether both generated the
same. The steps are enough for the worker to record its kernels.

Exits with 1 if values are apart or tokens differ. `benchmarks/kinds.py` measures what each kind costs.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

import tracewire
from tests.gpu_taps import PROMPTS, figures_of, together
from tests.support.engine_inside import engine_inside
from tracewire import (
    Coordinates,
    Features,
    Hold,
    Lens,
    LogitLens,
    Probe,
    Project,
    SparseAutoencoder,
    Steer,
    SteerFeatures,
    When,
)

STEPS = 24
#: Features of the autoencoder.
FEATURES = 512


def kinds(width: int, layer: int) -> dict[str, list[Any]]:
    """Interventions by the name of what is looked at."""
    rng, at = np.random.default_rng(0), f"residual({layer})"
    vector = (rng.normal(size=width) / width**0.5).astype(np.float32)
    encoder, decoder = (rng.normal(size=(2, FEATURES, width)) / width**0.5).astype(np.float32)
    sae = SparseAutoencoder(encoder, decoder, architecture="jumprelu", threshold=np.full(FEATURES, 0.1, np.float32))
    small = SparseAutoencoder(encoder[:64], decoder[:64], architecture="topk", k=8)
    score, after = Probe("score", at, vector), Probe("after", "residual(-1)", vector)
    basis = rng.normal(size=(3, width)).astype(np.float32)
    return {
        "plain": [],
        "Probe": [score],
        "Steer": [Steer(at, vector), after],
        "when probe": [score, Steer("residual(-2)", vector, when=When(probe="score", above=0.0, release=-0.5)), after],
        "when tokens": [Steer(at, vector, when=When(tokens=[[token] for token in range(0, 2000, 2)])), after],
        "when every": [Steer(at, vector, when=When(start=2, every=3)), after],
        "Hold": [score, Hold("strength", at, vector, "score", 1.0, -2.0, 2.0), after],
        "Hold gain": [score, Hold("strength", "residual(-2)", vector, "score", 1.0, -2.0, 2.0, gain=0.1), after],
        "Features": [Features("top", at, sae, top_k=8), after],
        "Features chosen": [Features("chosen", at, sae, indices=[1, 5, 9]), after],
        "SteerFeatures": [SteerFeatures(at, small, [1, 5], scale=0.5, add=1.0), after],
        "Lens": [Lens("lens", at, np.eye(width, dtype=np.float32)[:, ::-1].copy(), top_k=2)],
        "LogitLens": [LogitLens("lens", at, top_k=2)],
        "Coordinates": [Coordinates("coordinates", at, basis)],
        "Project": [Project(at, basis, remove=True), after],
        "moments": [Probe("moments", at, reduce="moments")],
    }


async def on(options: Any, taps: list[str], look: Any) -> Any:
    """What `look(client, model)` finds on an engine with these taps."""
    given: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "gpu_memory_utilization": 0.1}
    given["kv_cache_memory_bytes"] = 2 << 30
    given["model_runner"] = options.model_runner
    if options.model is not None:
        given["load_format"] = "dummy"
    inside = engine_inside(model=options.model, check_collect=False, taps=taps, **given)
    async with inside as (_, url), tracewire.connect(url) as client:
        return await look(client, await client.models.get("demo", timeout=60))


async def run(options: Any) -> dict[str, Any]:
    """All of it."""

    async def values(client: Any, model: Any) -> dict[str, Any]:
        declared = kinds(model.info.hidden_size, options.layer)
        return {
            name: await together(client, model, PROMPTS[:4], STEPS, interventions=one) for name, one in declared.items()
        }

    graphs = await on(options, ["model.layers.*.output"], values)
    eager = await on(options, [], values)
    return {name: differences(graphs[name], eager[name]) for name in graphs}


def _numbers(saved: list[Any]) -> Any:
    """What was saved, of lenses the logits."""
    return np.asarray([item["logits"] if isinstance(item, dict) else item for item in saved], np.float64)


def differences(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Whether two lists of results have the same tokens, and how far their saves are apart."""
    apart, same = 0.0, True
    for one, other in zip(ours, theirs, strict=True):
        same = same and list(one.token_ids) == list(other.token_ids)
        for name in one.saves.keys() - {"top"}:
            mine, its = _numbers(one.saves[name]), _numbers(other.saves[name])
            apart = max(apart, float(np.abs(mine - its).max() / (np.abs(its).max() + 1e-9)))
    return {"apart": apart, "tokens": same}


def parsed(doc: str) -> argparse.Namespace:
    """The options of a program with this docstring: a model, a layer of it, and a runner of vLLM's."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--model", help="a folder; the demo model if there is none")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--model-runner", choices=("auto", "first", "second"), default="auto", help="of vLLM's")
    return parser.parse_args()


def main() -> int:
    """Print the figures; whether they are as they should be."""
    figures = figures_of(run, parsed(__doc__))
    print(json.dumps(figures, indent=1))
    return 0 if all(one["tokens"] and one["apart"] < 0.05 for one in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
