"""Find the direction between code and prose in the demo model's residual stream, and measure what adding it does.

Everything goes through Tracewire: the activations are saves of traces of one token each, and the steered texts are
traces whose block adds the direction. It needs a running engine for the demo model:

    tracewire redis &                                   # prints its URL
    tracewire engine demo --url URL &
    python examples/demo_model/direction.py --url URL

The direction is the difference of two means (Marks and Tegmark 2023, "The Geometry of Truth"): the mean residual
stream after one decoder layer over code documents, minus that over prose documents, documents weighing alike. It is
written as `direction.npy` (float32, unit length, shape `[hidden_size]`) with `direction.json`, which holds the layer,
the strengths and the scores over the 50 prompts of `prompts.txt`, steered and unsteered.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import numpy as np

import tracewire

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from score import CodeScore  # noqa: E402
from train import read_corpus, texts_of  # noqa: E402

#: After which decoder layer the stream is read and bent.
LAYER = 4
#: How far to go, as multiples of the distance between the two means.
TOWARDS_CODE, TOWARDS_PROSE = 1.5, -2.0
#: Documents of each kind, tokens read of each, and leading positions left out (they carry little of either).
DOCUMENTS, LENGTH, SKIP = 64, 256, 8


@tracewire.intervention
def mean_stream(model, tracer, live, layer, skip, stop):  # type: ignore[no-untyped-def]
    """Save the mean of the residual stream over a prompt, and its mean norm."""
    stream = model.residual(layer).output[skip:stop].float()
    mean = stream.mean(0).save()
    norm = stream.norm(dim=-1).mean().save()


@tracewire.intervention
def steer(model, tracer, live, direction, layer, strength):  # type: ignore[no-untyped-def]
    """Add `strength * direction` to the residual stream at every position of every step."""
    for _ in tracer.iter[:]:
        stream = model.residual(layer).output
        model.residual(layer).output = stream + (strength * direction).to(stream.dtype)


async def means(client: Any, model: Any, documents: list[str]) -> tuple[Any, float]:
    """The mean stream and the mean norm over documents, each weighing alike."""
    results: list[Any] = [None] * len(documents)

    async def one(index: int, text: str) -> None:
        block = mean_stream(layer=LAYER, skip=SKIP, stop=LENGTH)
        async with client.trace(model, text, block, max_tokens=1) as trace:
            results[index] = (await trace.result()).saves

    async with anyio.create_task_group() as group:
        for index, text in enumerate(documents):
            group.start_soon(one, index, text)
    return np.mean([saves["mean"] for saves in results], axis=0), fmean(float(saves["norm"]) for saves in results)


async def score(client: Any, model: Any, prompts: list[str], block: Any) -> tuple[list[float], list[str]]:
    """The code score of what the model writes after each prompt, and the texts."""
    scorer = CodeScore.load()
    texts = [""] * len(prompts)

    async def one(index: int, prompt: str) -> None:
        sampling = {"max_tokens": 64, "temperature": 0.8, "seed": 1000 + index, "ignore_eos": True}
        async with client.trace(model, prompt, block, **sampling) as trace:
            texts[index] = (await trace.result()).text

    async with anyio.create_task_group() as group:
        for index, prompt in enumerate(prompts):
            group.start_soon(one, index, prompt)
    return [scorer(text) for text in texts], texts


def documents_by_kind(count: int) -> tuple[list[str], list[str]]:
    """The first characters of `count` training documents of each kind, evenly spread over the corpus."""
    documents, _ = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    chosen = []
    for kind in ("code", "prose"):
        texts = [text[: 8 * LENGTH] for text in texts_of(documents, kind, held_out=False) if len(text) > 4 * LENGTH]
        chosen.append(texts[:: max(1, len(texts) // count)][:count])
    return chosen[0], chosen[1]


async def run(url: str, out: Path, documents: int, share: int) -> None:
    """Compute, write and measure the direction, by every `share`-th prompt."""
    code, prose = documents_by_kind(documents)
    prompts = [json.loads(line) for line in (HERE / "prompts.txt").read_text().splitlines() if line.strip()]
    prompts = prompts[: len(prompts) // 2][::share] + prompts[len(prompts) // 2 :][::share]
    async with tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=120)
        code_mean, code_norm = await means(client, model, code)
        prose_mean, prose_norm = await means(client, model, prose)
        difference = (code_mean - prose_mean).astype(np.float32)
        distance = float(np.linalg.norm(difference))
        direction = difference / distance
        np.save(out / "direction.npy", direction)

        figures: dict[str, Any] = {
            "layer": LAYER,
            "distance": distance,
            "mean_norm": {"code": code_norm, "prose": prose_norm},
            "scale": float(max(abs(code_mean @ direction), abs(prose_mean @ direction), 2 * distance)),
            "documents": documents,
            "prompts": len(prompts),
        }
        runs = [
            ("unsteered", None, 0.0),
            ("towards_code", TOWARDS_CODE, TOWARDS_CODE * distance),
            ("towards_prose", TOWARDS_PROSE, TOWARDS_PROSE * distance),
        ]
        for name, multiple, strength in runs:
            block = None if multiple is None else steer(direction=direction, layer=LAYER, strength=strength)
            scores, texts = await score(client, model, prompts, block)
            half = len(prompts) // 2
            figures[name] = {
                "strength": strength,
                "mean_score": fmean(scores),
                "after_code_prompts": fmean(scores[:half]),
                "after_prose_prompts": fmean(scores[half:]),
                "share_scored_code": fmean(value > 0.5 for value in scores),
                "sample": {"prompt": prompts[half], "text": texts[half]},
            }
            print(f"{name:14} strength {strength:7.2f}   mean code score {fmean(scores):.3f}", flush=True)
    (out / "direction.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write (default: this one)")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of each kind, whose streams are averaged")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="write after every N-th prompt only")
    options = parser.parse_args()
    anyio.run(run, options.url, options.out, options.documents, options.every)


if __name__ == "__main__":
    main()
