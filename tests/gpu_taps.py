"""What only a GPU shows: taps in CUDA graphs, and what KV that is not finite does to later requests.

    python -m tests.gpu_taps --model FOLDER [--layer 3] [--backend FLASH_ATTN --backend TRITON_ATTN ...] [--eager]
        [--only-taps] [--model-runner second]

Starts one engine after the other, with dummy weights, and prints one JSON object:

- `taps`: a block that reads a layer, a `Probe` and a `Steer`, on an engine with CUDA graphs and one tap, and on an
  eager one. `read` and `probed` are how many steps were read on each, `block_apart` and `probe_apart` the greatest
  relative difference of what was read, `tokens` and `steered` whether both generated the same. `kernels` says by which
  kernels the graphs compute activations and rotary embeddings.
- `whole`: all layers read and steered at once, on an engine with CUDA graphs and taps at all layers, and on an eager
  one.
  `apart` is the greatest relative difference of what was read, `tokens` whether both generated the same, and `steps`
  how many steps were served by kernels within whole graphs, with blocks beside them (`beside`) and without.
- `infinite`, by attention backend: how many plain requests of 40 answer otherwise after traces with infinite
  activations, as it is (`zeroed`), and with the KV blocks that traces leave not zeroed (`left`), which says for which
  backends it matters. `repeats` is whether they answer the same at all.

Exits with 1 if a tap was not read, the values are apart, or plain requests were harmed although blocks are zeroed.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import numpy as np

import tracewire
from tests.support.engine_inside import engine_inside
from tracewire import LogitLens, Probe, Steer
from tracewire_engine.launch.engine_builder import versions

PROMPTS = [[7 * number + place for place in range(5 + number)] for number in range(1, 9)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
STEPS = 24


@tracewire.intervention
def reads(model, tracer, live, layer):
    found = [].save()
    for _ in tracer.iter[:]:
        hidden, residual = model.model.layers[layer].output
        found.append((hidden[-1] + residual[-1]).float().clone())


@tracewire.intervention
def explodes(model, tracer, live, layer):
    for _ in tracer.iter[:]:
        model.model.layers[layer].output[0][:] *= float("inf")


@tracewire.intervention
def leaves_blocks(model, tracer, live):
    """Have this worker zero no KV block any more."""
    from tracewire_engine.worker.kv_offload import KVBlocks

    KVBlocks.zero = lambda self, ids: None
    model.logits


@tracewire.intervention
def names_kernels(model, tracer, live):
    """How CUDA graphs compute the modules that the worker compiles: for each form of their tensors, one line."""
    methods = [module.__dict__.get("_forward_method") for module in model._module.modules()]
    model.logits
    functions = {id(found): found for found in (getattr(method, "_function", None) for method in methods) if found}
    kernels = [str(form) for function in functions.values() for form in function.faster.values()].save()


@tracewire.intervention
def counts_steps(model, tracer, live):
    """How many steps the kernels at the taps have served so far."""
    from tracewire_engine.worker.declared.plan import DeclaredRequests

    if not hasattr(DeclaredRequests, "counted"):
        DeclaredRequests.counted, fits = [0], DeclaredRequests.fits_buffers

        # Its names are bound here: the block's own are gone when it has ended.
        def counting(self, *tokens, fits=fits, counted=DeclaredRequests.counted):
            found = fits(self, *tokens)
            counted[0] += found
            return found

        DeclaredRequests.fits_buffers = counting
    model.logits
    served = [DeclaredRequests.counted[0]].save()


async def together(client: Any, model: Any, prompts: list[Any], steps: int = STEPS, **what: Any) -> list[Any]:
    """The results of traces that run at once."""
    found: dict[int, Any] = {}

    async def one(place: int) -> None:
        async with client.trace(model, prompts[place], max_tokens=steps, **GREEDY, **what) as trace:
            found[place] = await trace.result()

    async with anyio.create_task_group() as group:
        for place in range(len(prompts)):
            group.start_soon(one, place)
    return [found[place] for place in range(len(prompts))]


async def read_on(options: Any, taps: list[str]) -> dict[str, Any]:
    """What one engine reads and generates."""
    layer = options.layer
    async with (
        engine_inside(model=options.model, check_collect=False, taps=taps, **engine_options(options)) as (
            _,
            url,
        ),
        tracewire.connect(url) as client,
    ):
        model = await client.models.get("demo", timeout=60)
        (block,) = await together(client, model, PROMPTS[:1], block=reads(layer=layer))
        probe = [Probe("read", f"residual({layer})", reduce="norm")]
        (probed,) = await together(client, model, PROMPTS[:1], interventions=probe)
        vector = np.linspace(-4, 4, model.info.hidden_size, dtype=np.float32)
        (steered,) = await together(client, model, PROMPTS[:1], interventions=[Steer(f"residual({layer})", vector)])
        (named,) = await together(client, model, PROMPTS[:1], 1, block=names_kernels())
    return {
        "kernels": list(named.saves["kernels"]),
        "block": [np.asarray(one, np.float64) for one in block.saves["found"]],
        "probe": [np.asarray(one, np.float64) for one in probed.saves["read"]],
        "tokens": list(block.token_ids),
        "steered": list(steered.token_ids),
    }


async def tapped(options: Any) -> dict[str, Any]:
    """An engine with CUDA graphs beside an eager one."""
    graphs = await read_on(options, [f"model.layers.{options.layer}.output"])
    eager = await read_on(options, [])
    figures: dict[str, Any] = {"read": [len(graphs["block"]), len(eager["block"])]}
    figures["probed"] = [len(graphs["probe"]), len(eager["probe"])]
    for name in ("block", "probe"):
        pairs = list(zip(graphs[name], eager[name], strict=False))
        figures[f"{name}_apart"] = max(
            (float(np.abs(ours - theirs).max() / (np.abs(theirs).max() + 1e-9)) for ours, theirs in pairs), default=None
        )
    figures["tokens"] = graphs["tokens"] == eager["tokens"]
    figures["steered"] = graphs["steered"] == eager["steered"]
    figures["kernels"] = graphs["kernels"]
    figures["steer_matters"] = graphs["steered"] != graphs["tokens"]
    return figures


async def whole_on(options: Any, taps: list[str]) -> dict[str, Any]:
    """What one engine reads and generates where all layers are read and steered."""
    inside = engine_inside(model=options.model, check_collect=False, taps=taps, **engine_options(options))
    async with inside as (_, url), tracewire.connect(url) as client:
        return await whole_of(client, await client.models.get("demo", timeout=60), options.layer, bool(taps))


async def whole_of(client: Any, model: Any, layer: int, tapped: bool) -> dict[str, Any]:
    """What an engine reads and generates where all layers are read and steered."""
    width = model.info.hidden_size
    vector, direction = np.linspace(-1, 1, width, dtype=np.float32), np.ones(width, np.float32)
    several = [Probe("before", "residual(*)"), Steer("residual(*)", vector, scale=0.02)]
    behind = [Steer("residual(*)", vector, scale=0.02), Probe("after", "residual(*)", weight=direction)]
    lens = [LogitLens("lens", "residual(*)", top_k=2)]

    async def steps() -> int:
        if not tapped:
            return 0
        (found,) = await together(client, model, PROMPTS[:1], 1, block=counts_steps())
        return int(found.saves["served"][0])

    counted = [await steps()]
    results = []
    for interventions in (several, behind, lens):
        results += await together(client, model, PROMPTS[:3], interventions=interventions)
    counted.append(await steps())
    async with anyio.create_task_group() as group:
        # A block in each step: the graphs break, and everything is read all the same.
        group.start_soon(partial(together, client, model, PROMPTS[3:6], block=reads(layer=layer)))
        results += await together(client, model, PROMPTS[:3], interventions=several)
    counted.append(await steps())
    return {"results": results, "steps": counted}


def whole_apart(graphs: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """What two engines came to, compared."""
    apart, same = 0.0, True
    for ours, theirs in zip(graphs["results"], eager["results"], strict=True):
        same = same and list(ours.token_ids) == list(theirs.token_ids)
        for name in ours.saves.keys() & {"before", "after"}:
            pairs = zip(ours.saves[name], theirs.saves[name], strict=True)
            for one, other in pairs:
                one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
                apart = max(apart, float(np.abs(one - other).max() / (np.abs(other).max() + 1e-9)))
    alone, beside = np.diff(graphs["steps"]).tolist()
    return {"apart": apart, "tokens": same, "steps": alone, "beside": beside}


async def whole(options: Any) -> dict[str, Any]:
    """Kernels within whole graphs beside an eager engine."""
    graphs = await whole_on(options, ["model.layers.*.output"])
    return whole_apart(graphs, await whole_on(options, []))


async def harmed(options: Any, backend: str) -> dict[str, Any]:
    """Whether plain requests are as before after infinite ones, with KV blocks zeroed, and without."""
    given = engine_options(options) | ({"attention_backend": backend} if backend != "default" else {})
    taps = [] if options.eager else [f"model.layers.{options.layer}.output"]
    figures: dict[str, Any] = {}
    inside = engine_inside(model=options.model, check_collect=False, taps=taps, **given)
    async with inside as (_, url), tracewire.connect(url) as client:
        model = await client.models.get("demo", timeout=60)
        before = [one.token_ids for one in await together(client, model, PROMPTS)]
        again = [one.token_ids for one in await together(client, model, PROMPTS)]
        figures["repeats"] = before == again
        vector = np.full(model.info.hidden_size, 3e38, np.float32)
        for how in ("zeroed", "left"):
            if how == "left":
                await together(client, model, PROMPTS[:1], 1, block=leaves_blocks())
            await together(client, model, PROMPTS, block=explodes(layer=options.layer))
            steer = [Steer(f"residual({options.layer})", vector)]
            await together(client, model, PROMPTS, interventions=steer)
            rounds = [[one.token_ids for one in await together(client, model, PROMPTS)] for _ in range(5)]
            figures[how] = sum(ours != theirs for found in rounds for ours, theirs in zip(found, before, strict=True))
    return figures


def engine_options(options: Any) -> dict[str, Any]:
    """vLLM's options of all engines."""
    found: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.1}
    found["model_runner"] = options.model_runner
    if options.dummy:
        found |= {"load_format": "dummy"}
    return found | getattr(options, "engine", {})


async def run(options: Any) -> dict[str, Any]:
    """All of it."""
    found = versions()
    figures: dict[str, Any] = {"vllm": found.vllm, "torch": found.torch, "infinite": {}}
    if not options.eager:
        figures["taps"] = await tapped(options)
        figures["whole"] = await whole(options)
    for backend in options.backend or ([] if options.only_taps else ["default"]):
        try:
            figures["infinite"][backend] = await harmed(options, backend)
        except Exception as error:  # a backend that this machine does not have
            figures["infinite"][backend] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return figures


def figures_of(run: Callable[[Any], Awaitable[dict[str, Any]]], options: Any) -> dict[str, Any]:
    """What `run` measures in this process, in which vLLM logs errors alone."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return anyio.run(run, options)


def main() -> int:
    """Print the figures; whether they are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder; the demo model if there is none")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--model-runner", choices=("auto", "first", "second"), default="auto", help="of vLLM's")
    parser.add_argument("--backend", action="append", help="an attention backend of vLLM's; again for another")
    parser.add_argument("--only-taps", action="store_true", help="leave infinite activations out")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: as on a CPU")
    parser.add_argument("--weights", dest="dummy", action="store_false", help="load the model's weights")
    options = parser.parse_args()
    options.dummy = options.dummy and options.model is not None
    figures = figures_of(run, options)
    print(json.dumps(figures, indent=1))
    taps = figures.get("taps")
    good = taps is None or (taps["read"] == taps["probed"] == [STEPS, STEPS] and taps["block_apart"] < 0.05)
    good = good and (taps is None or not any("other values" in one for one in taps["kernels"]))
    of_whole = figures.get("whole")
    good = good and (of_whole is None or (of_whole["apart"] < 0.05 and of_whole["steps"] >= 2 * STEPS))
    return 0 if good and not any(found.get("zeroed") for found in figures["infinite"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
