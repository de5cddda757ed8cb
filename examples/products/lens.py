"""A logit lens over time: what each layer would say next, at each token as it comes. `python lens.py [PROMPT]`

A row is a sampled token, a column a layer. Each cell is the likeliest token by the layer's residual stream.
"""

from __future__ import annotations

import asyncio
import sys

import tracewire
from tracewire import LogitLens


async def main(prompt: str = "import os\n\ndef main(", tokens: int = 16) -> None:
    async with tracewire.Client() as client:
        model = await client.models.get("demo", timeout=30)
        lens = LogitLens("lens", "residual(*)", top_k=1)
        trace = client.trace(
            model, prompt, interventions=[lens], max_tokens=tokens, token_strings=True, temperature=0.0
        )
        header, layers = f"{'token':>12} |", None
        async for output in trace.outputs():
            for string, item in zip(output.token_strings, output.delta.get("lens", ()), strict=True):
                if layers is None:
                    layers = len(item["token_strings"])
                    print(header + "".join(f"{layer:>12}" for layer in range(layers)))
                cells = "".join(f"{top[0]!r:>12.12}" for top in item["token_strings"])
                print(f"{string!r:>12.12} |{cells}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
