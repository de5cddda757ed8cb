"""What only a GPU shows of speculative decoding: taps in CUDA graphs, whose steps have drafts.

    python -m tests.gpu_drafts [--model-runner second] [--method ngram ...] [--tolerance 0.05] [--json]

An engine for each method of drafting, with full CUDA graphs and taps, and an eager one without drafts run beside each
other, on the demo model and with draft models made of it. Each gets traces with declared interventions of each kind
that is drafted, one at a time and then all at once, beside plain ones and ones with blocks. By method, the figures are:

- `requests`, and `equal`: how many of them came to the tokens and saves of the eager engine. `apart` is the greatest
  relative difference of saves, and `differing` has the requests that are further apart than `--tolerance`.
- `ties`: how many requests went another way at a token that the eager engine found about as probable as its own. Sums
  of bfloat16 are rounded otherwise in steps of other sizes. They are compared up to that token, and are not `equal`.
- `drafted` and `taken`: tokens.
- `steps`: those with drafts. `whole` of them ran as a whole CUDA graph, whose taps kernels served; `broken` of them as
  a graph that stops at the taps. The others had requests of several lengths, for which vLLM has no full graph. `failed`
  is 1 if both graphs did not come to the same.

A method with `+ahead` has asynchronous scheduling, the others do not. `--eager` leaves graphs and taps out, as on a
CPU, with one engine after the other.

Exits with 1 if a request differs, no draft was taken, or no step ran as a whole graph.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

import tracewire
from tests.support.blocks import parallel as blocks
from tests.support.draft_models import drafting_model
from tests.support.drafted_kinds import DRAFTED
from tests.support.parallel.layouts import served
from tests.support.runners import interpreted, planning_ahead
from tests.support.speculation import GREEDY, NGRAM, text
from tracewire import Client, Model
from tracewire_engine.launch.engine_builder import versions

#: By runner, the methods that vLLM 0.25.1 has for it on a GPU.
METHODS = {
    "first": ["ngram", "draft_model", "draft_model+ahead", "eagle+ahead", "eagle3+ahead"],
    "second": ["eagle", "eagle+ahead", "eagle3+ahead"],
}
#: What the traces ask for.
TAPS = [
    "model.embed_tokens.output",
    "model.layers.*.output",
    "model.layers.*.mlp.output",
    "model.layers.*.self_attn.o_proj.input",
]
#: The name of the eager engine.
EAGER = "eager"
#: Behind a method's name: with asynchronous scheduling.
_AHEAD = "+ahead"
#: How much less probable than its own the eager engine finds a token that is as good: of logarithms.
_TIE = 0.1

#: What the blocks of `counted` have found, in this order.
COUNTED = ("drafted", "taken", "steps", "whole", "broken", "failed")

Found = dict[str, dict[str, Any]]


@tracewire.intervention
def counts_drafts(model, tracer, live):
    """What the worker's steps have had since the first such block: see `COUNTED`."""
    from tracewire_engine.worker.declared.plan import DeclaredRequests
    from tracewire_engine.worker.runner import TracewireRunner

    if not hasattr(TracewireRunner, "counted"):
        counted = TracewireRunner.counted = dict.fromkeys(("drafted", "taken", "steps", "whole", "broken", "failed"), 0)
        begin, serve = TracewireRunner.begin_rows, TracewireRunner.serve_samples
        fits, run, drafts = DeclaredRequests.fits_buffers, DeclaredRequests.run_both, [False]

        # Their names are bound here: the block's own are gone when it has ended.
        def beginning(self, scheduler_output, order, begin=begin, counted=counted, drafts=drafts):
            given = scheduler_output.scheduled_spec_decode_tokens
            drafts[0] = bool(given)
            counted["steps"] += bool(given)
            counted["drafted"] += sum(len(one) for one in given.values())
            return begin(self, scheduler_output, order)

        def serving(self, drawn, counts=None, serve=serve, counted=counted, drafts=drafts):
            found = serve(self, drawn, counts)
            if drafts[0]:
                sampled = (found >= 0).sum(1) if counts is None else counts
                counted["taken"] += int((sampled - 1).clamp(min=0).sum())
            return found

        def fitting(self, *tokens, fits=fits, counted=counted, drafts=drafts):
            found = fits(self, *tokens)
            if drafts[0]:
                counted["whole" if found else "broken"] += 1
            return found

        def running(self, *graphs, run=run, counted=counted):
            output = run(self, *graphs)
            counted["failed"] = int(self.proof.failed)
            return output

        TracewireRunner.begin_rows, TracewireRunner.serve_samples = beginning, serving
        DeclaredRequests.fits_buffers, DeclaredRequests.run_both = fitting, running
    model.logits
    found = list(TracewireRunner.counted.values()).save()


async def counted(client: Client, model: Model) -> dict[str, int]:
    """What the worker has counted so far."""
    async with client.trace(model, text(0), counts_drafts(), max_tokens=1, **GREEDY) as trace:
        found = (await trace.result()).saves["found"]
    return dict(zip(COUNTED, map(int, found), strict=True))


async def came_to(
    client: Client, model: Model, kinds: Iterable[str] = DRAFTED, *, tokens: int = 30, logprobs: bool = False
) -> Found:
    """What each request comes to, by its name: token ids, saves, and the logarithms of probabilities if asked for."""
    found: Found = {}
    wanted = {"logprobs": 5} if logprobs else {}

    async def one(name: str, number: int, block: Any = None, declared: Any = ()) -> None:
        sampling = {**GREEDY, "max_tokens": tokens + number % 5, **wanted}
        async with client.trace(model, text(number), block, interventions=list(declared), **sampling) as trace:
            outputs = [output async for output in trace.outputs()]
            result = await trace.result()
            state = await client.get_state(trace.id)
        found[name] = {
            "tokens": list(result.token_ids),
            "saves": dict(result.saves),
            "drafts": [drafts.tokens for drafts in state.accepted.drafts],
            "logprobs": [entry for output in outputs for entry in output.logprobs or ()],
        }

    chosen = list(kinds)
    for number in range(3):
        await one(f"plain {number}", number)
    for number, kind in enumerate(chosen):
        await one(kind, number, declared=DRAFTED[kind](number))
    async with anyio.create_task_group() as group:
        for number, kind in enumerate(chosen):
            group.start_soon(partial(one, f"{kind} beside others", number + 1, declared=DRAFTED[kind](number + 1)))
            if not number % 4:
                group.start_soon(one, f"plain beside others {number}", number)
            if not number % 8:
                group.start_soon(one, f"block beside others {number}", number, blocks.logits_and_samples)
    return found


def _numbers(saved: Any) -> np.ndarray:
    """What an item of a save has: of lenses the logits, of features the activations."""
    if isinstance(saved, dict):
        saved = next(saved[name] for name in ("logits", "activations", "weights") if name in saved)
    return np.asarray(saved, np.float64)


def _apart(one: list[Any], other: list[Any]) -> float:
    """How far two saves are apart, in parts of the greatest element."""
    if len(one) != len(other):
        return float("inf")
    apart = most = 0.0
    for mine, its in zip(map(_numbers, one), map(_numbers, other), strict=True):
        if mine.shape != its.shape or not np.array_equal(np.isnan(mine), np.isnan(its)):
            return float("inf")
        apart = max(apart, float(np.abs(np.nan_to_num(mine) - np.nan_to_num(its)).max(initial=0.0)))
        most = max(most, float(np.abs(np.nan_to_num(its)).max(initial=0.0)))
    return apart / (most + 1e-9)


def compared(ours: Found, known: Found, tolerance: float) -> dict[str, Any]:
    """How requests of an engine with drafts compare with those of one without."""
    assert ours.keys() == known.keys()
    figures: dict[str, Any] = {"requests": len(ours), "equal": 0, "ties": 0, "apart": 0.0, "differing": {}}
    for name, mine in ours.items():
        other = known[name]
        tokens, its = mine["tokens"], other["tokens"]
        pairs = enumerate(zip(tokens, its, strict=False))
        at = next((place for place, (one, another) in pairs if one != another), None)
        if at is None and len(tokens) != len(its):
            figures["differing"][name] = f"{len(tokens)} tokens, not {len(its)}"
            continue
        if at is not None:
            probable = other["logprobs"][at]
            behind = probable[its[at]][0] - probable[tokens[at]][0] if tokens[at] in probable else float("inf")
            if behind > _TIE:
                figures["differing"][name] = f"token {at} is {tokens[at]}, not {its[at]}, and {behind:.3g} behind it"
                continue
        if mine["saves"].keys() != other["saves"].keys():
            figures["differing"][name] = f"saves {list(mine['saves'])}, not {list(other['saves'])}"
            continue
        apart, where = 0.0, ""
        for save, items in mine["saves"].items():
            theirs = other["saves"][save]
            if at is not None:
                # Items of other tokens have no place to be compared at.
                one_each = len(items) == len(tokens) and len(theirs) == len(its)
                items, theirs = (items[: at + 1], theirs[: at + 1]) if one_each else ((), ())
            difference = _apart(items, theirs)
            if difference > apart:
                apart, where = difference, save
        figures["apart"] = max(figures["apart"], apart)
        if apart > tolerance:
            figures["differing"][name] = f"{where} is {apart:.3g} apart"
        else:
            figures["equal" if at is None else "ties"] += 1
    return figures


def good(figures: dict[str, Any], *, eager: bool) -> bool:
    """Whether a method's figures are as they should be."""
    right = not figures["differing"] and figures["taken"] > 0 and figures["ties"] <= figures["requests"] // 4
    return right and (eager or (not figures["failed"] and figures["whole"] > 0))


async def on(name: str, options: argparse.Namespace, folder: Path) -> tuple[Found, dict[str, int]]:
    """What an engine's requests come to, and what its worker has counted. `name` is of a method, or `EAGER`."""
    await anyio.Path(folder).mkdir()
    given = ["--model-runner", options.model_runner, "--max-num-seqs", "32", *options.engine]
    given += ["--kv-cache-memory-bytes", str(256 << 20)]
    if not options.eager:
        given += ["--gpu-memory-utilization", "0.1"]
    if name == EAGER:
        given += ["--no-async-scheduling"]
    else:
        method, ahead, _ = name.partition(_AHEAD)
        given += ["--speculative-config", json.dumps(options.configs[method])]
        given += ["--async-scheduling" if ahead else "--no-async-scheduling"]
        given += [] if options.eager else [option for tap in TAPS for option in ("--tap", tap)]
    # On a CPU vLLM has asynchronous scheduling and its second runner in tests only.
    environment = planning_ahead() if options.eager else {}
    if options.eager and options.model_runner == "second":
        environment |= interpreted()
    async with served(folder, *given, cores="auto", environment=environment) as engine, engine.client() as client:
        model = await client.models.get("demo", timeout=60)
        print(f"{name}: ready", file=sys.stderr)
        await counted(client, model)
        with anyio.fail_after(240):
            found = await came_to(client, model, logprobs=name == EAGER)
        return found, await counted(client, model)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in an exception group and the groups in it; another error by itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    methods = options.method or METHODS[options.model_runner]
    came: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = dict.fromkeys(name.removesuffix(_AHEAD) for name in methods)
        options.configs = {name: NGRAM if name == "ngram" else drafting_model(name, Path(folder)) for name in plain}
        limit = anyio.CapacityLimiter(1 if options.eager else len(methods) + 1)

        async def one(name: str) -> None:
            # Waiting for an engine blocks its thread.
            work: tuple[Callable[..., Any], ...] = (on, name, options, Path(folder) / f"engine {name}")
            try:
                came[name] = await anyio.to_thread.run_sync(anyio.run, *work, limiter=limit)
            except Exception as error:
                came[name] = "; ".join(f"{type(one).__name__}: {one}" for one in _leaves(error))
                print(f"{name}: {came[name]}", file=sys.stderr)

        async with anyio.create_task_group() as group:
            for name in (EAGER, *methods):
                group.start_soon(one, name)
    found = versions()
    figures: dict[str, Any] = {"vllm": found.vllm, "torch": found.torch, "methods": {}}
    for name in methods:
        failed = next((came[one] for one in (EAGER, name) if isinstance(came[one], str)), None)
        if failed is not None:
            figures["methods"][name] = {"error": failed, "good": False}
            continue
        (ours, counts), (known, _) = came[name], came[EAGER]
        method = compared(ours, known, options.tolerance) | counts
        figures["methods"][name] = method | {"good": good(method, eager=options.eager)}
    return figures


def main() -> int:
    """Print the figures; whether they are as they should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-runner", choices=sorted(METHODS), default="first", help="of vLLM's")
    parser.add_argument("--method", action="append", help="with +ahead behind it for asynchronous scheduling")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of saves, in parts of the greatest element")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs and no taps: as on a CPU")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    parser.add_argument("engine", nargs="*", help="options of all engines, behind --")
    options = parser.parse_args()
    figures = anyio.run(run, options)
    print(json.dumps(figures, indent=None if options.json else 1))
    return 0 if all(one["good"] for one in figures["methods"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
