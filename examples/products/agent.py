"""An agent that steers itself: it reads its own probe while it writes, and changes its own mind. `python agent.py`

The plan is a list of moods, each for so many tokens. The agent compares what its probe reads with the mood of the
moment, and changes its own strength with a compare-and-set. So a person who steers the same generation wins.
"""

from __future__ import annotations

import asyncio

from common import DIRECTION, LOCATION, code_probe

import tracewire
from tracewire import Live, Steer

PLAN = [("prose", 32), ("code", 32), ("prose", 32)]


async def main(gain: float = 4.0, most: float = 24.0) -> None:
    moods = [mood for mood, count in PLAN for _ in range(count)]
    watched = [Steer(LOCATION, DIRECTION, scale=Live("alpha")), code_probe()]
    async with tracewire.Client(name="agent") as client:
        alpha, version = 0.0, 0
        async with client.trace(
            "demo", "This module", interventions=watched, live={"alpha": 0.0}, max_tokens=len(moods), ignore_eos=True
        ) as trace:
            async for output in trace.outputs():
                felt = output.delta["code"][-1]
                mood = moods[min(output.index + len(output.token_ids), len(moods) - 1)]
                wrong = (mood == "code") != (felt > 0)
                step = gain if mood == "code" else -gain
                wanted = max(-most, min(most, alpha + step if wrong else alpha * 0.8))
                print(f"{output.text!r:>14.14} {felt:6.1f} wants {mood:5} alpha {alpha:5.1f}", flush=True)
                if abs(wanted - alpha) < 0.5:
                    continue
                try:
                    version = await trace.steer(alpha=wanted, if_version=version)
                    alpha = wanted
                except tracewire.VersionConflict:
                    live = await client.get_live(trace.id)
                    alpha, version = float(live.values["alpha"]), live.version
                except tracewire.TraceEnded:
                    break


if __name__ == "__main__":
    asyncio.run(main())
