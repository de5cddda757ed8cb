"""A steering loop: keeps a projection of the residual stream at a target, from token to token. `python steering.py`"""

import asyncio

import numpy as np

import tracewire
from tracewire import Live, Probe, Steer


async def main(target: float = 4.0, gain: float = 0.5) -> None:
    async with tracewire.Client() as client:
        model = await client.models.get("demo", timeout=30)
        direction = np.ones(model.info.hidden_size, np.float32) / model.info.hidden_size**0.5
        watched = [Steer("residual(2)", direction, scale=Live("alpha")), Probe("seen", "residual(2)", weight=direction)]
        live, alpha = {"alpha": 0.0}, 0.0
        async with client.trace(model, "This module", interventions=watched, live=live, max_tokens=32) as trace:
            async for item in trace:
                match item.type:
                    case "output" if item.delta:
                        alpha += gain * (target - item.delta["seen"][-1])
                        await trace.steer(alpha=alpha)
                    case "steered":
                        print(f"version {item.version} from token {item.first_token()} on: alpha {alpha:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
