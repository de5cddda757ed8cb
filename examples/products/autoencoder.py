"""A sparse autoencoder's training set by a harvest, and some steps of training. `python autoencoder.py FOLDER`

The harvest writes the residual stream of each position of each prompt. An interrupted harvest goes on where it was. The
training is plain NumPy, to show how batches are read; use your own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from common import LOCATION

import tracewire
from tracewire import Probe

PROMPTS = Path(__file__).parents[1] / "demo_model" / "prompts.txt"


def train(rows: np.ndarray, features: int = 512, steps: int = 300, batch: int = 256, penalty: float = 2.0) -> None:
    """Train an autoencoder with ReLU features and unit decoder rows by Adam, on rows float32 `[rows, hidden]`."""
    random = np.random.default_rng(0)
    rows = (rows - rows.mean(0)) / rows.std()
    decoder = random.standard_normal((features, rows.shape[1])).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    weights = {"encoder": decoder.T.copy(), "bias": np.zeros(features, np.float32), "decoder": decoder}
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in weights.items()}
    for step in range(1, steps + 1):
        x = rows[random.integers(0, len(rows), batch)]
        active = np.maximum(x @ weights["encoder"] + weights["bias"], 0)
        error = active @ weights["decoder"] - x
        upstream = (2 * error @ weights["decoder"].T / batch + penalty / batch) * (active > 0)
        gradients = {"encoder": x.T @ upstream, "bias": upstream.sum(0), "decoder": active.T @ (2 * error / batch)}
        for name, gradient in gradients.items():
            first, second = moments[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            weights[name] -= 3e-3 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        weights["decoder"] /= np.linalg.norm(weights["decoder"], axis=1, keepdims=True)
        if step % 100 == 0 or step == 1:
            unexplained = float((error**2).sum() / (x**2).sum())
            count = (active > 0).sum(1).mean()
            print(f"step {step:3}: unexplained variance {unexplained:.3f}, {count:.1f} features a row")


async def main(folder: str) -> None:
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    async with tracewire.Client() as client:
        probe = Probe("hs", LOCATION, positions="all")
        await client.harvest("demo", prompts, [probe], to=folder)
    rows = np.concatenate([np.asarray(prompt["hs"], np.float32) for prompt in tracewire.harvest.open(folder)])
    print(f"{len(prompts)} prompts, {len(rows)} rows of {rows.shape[1]}")
    train(rows)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
