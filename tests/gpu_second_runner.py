"""What only a GPU shows of vLLM's second model runner: taps in its CUDA graphs, beside an eager engine.

    python -m tests.gpu_second_runner [--model FOLDER] [--tolerance 0.02]

Prints one JSON object as the last line, and exits with 1 if anything differs:

- `scenarios`: those of `tests/support/parallel/scenarios.py` on the demo model, on an engine of the second runner with
  CUDA graphs and taps (`second-tapped`), beside an eager one (`second`). Token ids must be equal, values to
  `--tolerance` of the largest.
- `first`: the same scenarios on the first runner, eager, beside the second one. `differing` may name what is sampled at
  a temperature, for which the runners draw other numbers.
- `taps` and `whole`: as `tests.gpu_taps` has them, on the second runner. `whole.steps` is how many steps kernels within
  whole graphs served.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

from tests import gpu_taps
from tests.distributed.compare import compare
from tracewire_engine.launch.engine_builder import versions


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All of it, one engine after the other."""
    found = versions()
    memory = ["--gpu-memory-utilization", "0.3"]
    compared = SimpleNamespace(
        layout=["second", "second-tapped"], scenario=[], tolerance=options.tolerance, at_once=False, engine=memory
    )
    figures: dict[str, Any] = {"vllm": found.vllm, "torch": found.torch}
    figures["scenarios"] = (await compare(compared))["second-tapped"]
    compared.layout = ["second", "one"]
    figures["first"] = (await compare(compared))["one"]
    taps = SimpleNamespace(model=options.model, layer=3, model_runner="second", dummy=options.model is not None)
    figures["taps"] = await gpu_taps.tapped(taps)
    figures["whole"] = await gpu_taps.whole(taps)
    return figures


def main() -> int:
    """Print the figures; whether they are as they should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="for `taps` and `whole`, with dummy weights; the demo model if there is none")
    parser.add_argument("--tolerance", type=float, default=0.02)
    figures = gpu_taps.figures_of(run, parser.parse_args())
    print(json.dumps(figures))
    scenarios, taps, whole = figures["scenarios"], figures["taps"], figures["whole"]
    good = scenarios["equal"] == scenarios["scenarios"]
    good = good and taps["read"] == taps["probed"] == [gpu_taps.STEPS, gpu_taps.STEPS] and taps["block_apart"] < 0.05
    return 0 if good and whole["apart"] < 0.05 and whole["steps"] >= 2 * gpu_taps.STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
