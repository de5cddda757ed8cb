"""Activation patching between two prompts: which layer carries the difference? `python patching.py`

The clean and the corrupted prompt differ in one word. The program runs the corrupted prompt once for each layer. In
each run a block replaces the last position of that layer's residual stream by the clean prompt's. The recovery is 0
where the answer stays the corrupted one, and 1 where it becomes the clean one.
"""

from __future__ import annotations

import asyncio

import numpy as np

import tracewire
from tracewire import Probe

CLEAN, CORRUPTED = "The file is", "The class is"


@tracewire.intervention
def patch(model, tracer, live, layer, row):  # type: ignore[no-untyped-def]
    """Replace the last position of a layer's residual stream while the prompt is computed."""
    stream = model.residual(layer).output.clone()
    stream[-1] = row.to(stream.dtype)
    model.residual(layer).output = stream
    logits = model.logits[-1].float().save()


@tracewire.intervention
def answer(model, tracer, live):  # type: ignore[no-untyped-def]
    """Save the logits of the first token."""
    logits = model.logits[-1].float().save()


async def main() -> None:
    async with tracewire.Client() as client:
        model = await client.models.get("demo", timeout=30)

        async def logits(prompt: str, block: tracewire.Block, *probes: Probe) -> tracewire.Result:
            return await client.trace(
                model, prompt, block, interventions=probes, max_tokens=1, temperature=0.0
            ).result()

        clean, corrupted = await asyncio.gather(
            logits(CLEAN, answer, Probe("rows", "residual(*)")), logits(CORRUPTED, answer)
        )
        rows = clean.to_numpy("rows")[0]  # float32 [layers, hidden]
        best, worst = int(clean.saves["logits"].argmax()), int(corrupted.saves["logits"].argmax())

        def difference(result: tracewire.Result) -> float:
            found = np.asarray(result.saves["logits"], np.float64)
            return float(found[best] - found[worst])

        span = difference(clean) - difference(corrupted)
        patched = await asyncio.gather(
            *(logits(CORRUPTED, patch(layer=layer, row=row)) for layer, row in enumerate(rows))
        )
        for layer, result in enumerate(patched):
            recovery = (difference(result) - difference(corrupted)) / span
            print(f"layer {layer}: {recovery:5.2f} {'#' * round(20 * max(0.0, min(1.0, recovery)))}")


if __name__ == "__main__":
    asyncio.run(main())
