"""What only several GPUs show: taps in CUDA graphs of ranks and of stages, and ranks that need different graphs.

    python -m tests.gpu_ranks --model FOLDER --layout tensor_parallel_size=2 [--model-runner second]

Starts engines on all GPUs of the layout, one with CUDA graphs and taps at all layers and an eager one, with dummy
weights, and prints one JSON object:

- `taps`: a block that reads, two `Probe`s and two `Steer`s, at the first layer and the last one. `read` is how many
  steps were read, `apart` the greatest relative difference of what was read, `tokens` and `steered` whether both
  engines generated the same.
- `whole`: all layers read and steered at once, as of `tests.gpu_taps`.
- `ranks`, under tensor parallelism: one rank says in every other step that its kernels cannot serve the step. `agreed`
  has how many of the requests generated other `tokens` than before, and how far `apart` their values are. `alone` has
  the same for ranks that do not agree on the graph. `failed` has the errors of blocks that fail on one rank, `beside`
  what came of the requests beside them, and `repeats` what came of the same requests alone.

That ranks replay the same graph is what `test_graph_proof.py` shows: graphs that differ may come to the same values, as
`alone` says.

Exits with 1 if a value was not read, if the engines generated other tokens, if the values are apart, or if a request
was harmed although the ranks agree.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import anyio
import numpy as np

import tracewire
from tests.gpu_taps import (
    PROMPTS,
    STEPS,
    engine_options,
    figures_of,
    names_kernels,
    reads,
    together,
    whole_apart,
    whole_of,
)
from tests.support.engine_inside import engine_inside
from tracewire import EngineFailed, Probe, Steer

#: How many requests the ranks are watched with, and how often.
ROUNDS = 3


@tracewire.intervention
def needs_other_graphs(model, tracer, live, agree):
    """Have the second rank's kernels serve no step but every other one; and ranks agree, or not."""
    from vllm.distributed import get_tensor_model_parallel_rank

    from tracewire_engine.worker.declared.plan import DeclaredRequests
    from tracewire_engine.worker.parallel.rank_agreement import Ranks

    if not hasattr(DeclaredRequests, "fitting"):
        DeclaredRequests.fitting, Ranks.agreeing = DeclaredRequests.fits_buffers, Ranks.greatest
    calls, rank, fits = [0], get_tensor_model_parallel_rank(), DeclaredRequests.fitting

    def every_other(self, *tokens, calls=calls, rank=rank, fits=fits):
        calls[0] += 1
        return fits(self, *tokens) and not (rank and calls[0] % 2)

    DeclaredRequests.fits_buffers = every_other
    Ranks.greatest = Ranks.agreeing if agree else lambda self, number: number
    model.logits


@tracewire.intervention
def fails_on_one_rank(model, tracer, live, layer, step):
    from vllm.distributed import get_tensor_model_parallel_rank

    passed = 0
    for _ in tracer.iter[:]:
        model.model.layers[layer].output[0].sum()
        passed += 1
        if passed == step and get_tensor_model_parallel_rank():
            raise MemoryError("none left on this rank")


async def read_on(client: Any, model: Any) -> dict[str, Any]:
    """What one engine reads and generates at the first layer and at another one, which may be on another stage."""
    layers, found = (0, model.info.layer_count - 1), {}
    vector = np.linspace(-4, 4, model.info.hidden_size, dtype=np.float32)
    probes = [Probe(f"at_{layer}", f"residual({layer})", reduce="norm") for layer in layers]
    (probed,) = await together(client, model, PROMPTS[:1], interventions=probes)
    for layer in layers:
        (block,) = await together(client, model, PROMPTS[:1], block=reads(layer=layer))
        found[f"block at {layer}"] = [np.asarray(one, np.float64) for one in block.saves["found"]]
        found[f"probe at {layer}"] = [np.asarray(one, np.float64) for one in probed.saves[f"at_{layer}"]]
    steers = [Steer(f"residual({layer})", vector) for layer in layers]
    (steered,) = await together(client, model, PROMPTS[:1], interventions=steers)
    (named,) = await together(client, model, PROMPTS[:1], 1, block=names_kernels())
    return {
        "values": found,
        "tokens": list(probed.token_ids),
        "steered": list(steered.token_ids),
        "kernels": list(named.saves["kernels"]),
    }


def apart(ours: list[Any], theirs: list[Any]) -> float:
    """The greatest relative difference of arrays."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(one - other).max() / (np.abs(other).max() + 1e-9)) for one, other in pairs)


async def ranks_apart(client: Any, model: Any) -> dict[str, Any]:
    """Requests on ranks that need different graphs."""
    vector = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32)
    steers = [Probe("before", "residual(*)"), Steer("residual(*)", vector, scale=0.02)]

    async def watched() -> list[Any]:
        found = []
        for _ in range(ROUNDS):
            found += await together(client, model, PROMPTS[:4], interventions=steers)
        return found

    def harmed(found: list[Any]) -> dict[str, Any]:
        pairs = list(zip(found, before, strict=True))
        values = [[[np.asarray(row, np.float64) for row in one.saves["before"]] for one in pair] for pair in pairs]
        tokens = sum(list(one.token_ids) != list(other.token_ids) for one, other in pairs)
        return {"tokens": tokens, "apart": max(apart(*pair) for pair in values)}

    before = await watched()
    figures: dict[str, Any] = {"repeats": harmed(await watched())}
    errors: list[str] = []

    async def fail() -> None:
        for step in (3, 4, 7):
            try:
                await together(client, model, PROMPTS[5:6], block=fails_on_one_rank(layer=0, step=step))
            except* EngineFailed as group:
                errors.append(str(group.exceptions[0]))

    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        beside = await watched()
    figures["failed"] = errors
    figures["beside"] = harmed(beside)
    for how in ("agreed", "alone"):
        await together(client, model, PROMPTS[:1], 1, block=needs_other_graphs(agree=how == "agreed"))
        with anyio.move_on_after(120):
            figures[how] = harmed(await watched())
    return figures


async def all_on(options: Any, eager: bool) -> dict[str, Any]:
    """What one engine comes to."""
    taps = [] if eager else ["model.layers.*.output"]
    given = engine_options(options)
    inside = partial(engine_inside, model=options.model, check_collect=False, taps=taps)
    async with inside(**given) as (_, url), tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=60)
        found: dict[str, Any] = {"whole": await whole_of(client, model, 0, bool(taps))}
        found["taps"] = await read_on(client, model)
        if eager == options.eager and given.get("tensor_parallel_size", 1) > 1:
            found["ranks"] = await ranks_apart(client, model)
    return found


async def run(options: Any) -> dict[str, Any]:
    """All of it."""
    graphs, eager = await all_on(options, options.eager), await all_on(options, True)
    figures: dict[str, Any] = {"layout": options.layout}
    ours, theirs = graphs["taps"], eager["taps"]
    taps: dict[str, Any] = {"read": {name: len(one) for name, one in ours["values"].items()}}
    taps["apart"] = {name: apart(one, theirs["values"][name]) for name, one in ours["values"].items()}
    taps |= {name: ours[name] == theirs[name] for name in ("tokens", "steered")}
    figures["taps"] = taps | {"steer_matters": ours["steered"] != ours["tokens"], "kernels": ours["kernels"]}
    figures["whole"] = whole_apart(graphs["whole"], eager["whole"])
    return figures | ({"ranks": graphs["ranks"]} if "ranks" in graphs else {})


def good(figures: dict[str, Any], *, eager: bool = False) -> bool:
    """Whether they are as they should be."""
    taps, whole, ranks = figures["taps"], figures["whole"], figures.get("ranks")
    found = all(steps == STEPS for steps in taps["read"].values()) and taps["steer_matters"]
    found = found and taps["tokens"] and taps["steered"]
    found = found and max(*taps["apart"].values(), whole["apart"]) < 0.05 and (eager or whole["steps"] >= 2 * STEPS)
    if ranks is not None:
        found = found and len(ranks["failed"]) == 3
        for how in ("repeats", "beside", "agreed"):
            found = found and not ranks[how]["tokens"] and ranks[how]["apart"] < 0.05
    return found


def main() -> int:
    """Print the figures; whether they are as they should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a folder, with dummy weights; the demo model if there is none")
    parser.add_argument("--layout", default="tensor_parallel_size=2", help="or pipeline_parallel_size=2")
    parser.add_argument("--model-runner", choices=("auto", "first", "second"), default="auto", help="of vLLM's")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: as on a CPU")
    options = parser.parse_args()
    options.dummy = options.model is not None
    name, _, ranks = options.layout.partition("=")
    options.engine = {name: int(ranks)}
    figures = figures_of(run, options)
    print(json.dumps(figures, indent=1))
    return 0 if good(figures, eager=options.eager) else 1


if __name__ == "__main__":
    sys.exit(main())
