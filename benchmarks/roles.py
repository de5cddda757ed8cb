"""What runs in a process of its own during a benchmark: one engine each, driven by lines of JSON.

A role prints `{"ready": ...}` when its engine serves, then answers each line on its standard input, a workload, with
one line: seconds, tokens and CPU seconds by process, of some when the first output came, too, and how long after it the
last request's first one. The parent alternates the roles, so that they share the
machine's moods.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import time
import uuid
from itertools import accumulate, pairwise
from typing import Any

import psutil

from benchmarks.quantiles import StepTimes


def cpu_seconds(pid: int | None = None) -> dict[str, float]:
    """CPU seconds of a process (this one, if none is named) and of each below it, so far, by kind of process."""
    used: dict[str, float] = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            name = process.name()
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        kind = "worker" if "Worker" in name else "core" if "EngineCore" in name else "front"
        used[kind] = used.get(kind, 0.0) + times.user + times.system
    return used


def prompts(workload: dict[str, Any]) -> list[list[int]]:
    """Token ids of each request's prompt: the workload's, or different ones that are the same in every role."""
    if "prompts" in workload:
        given: list[list[int]] = workload["prompts"]
        return given
    count, length = workload["concurrency"], workload["prompt_tokens"]
    first, every = workload.get("share", (0, 1))
    requests = range(first, count, every)
    return [[1 + (7 * request + 3 * index) % 200 for index in range(length)] for request in requests]


def successions(workload: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The workload of each of its requests, in a list for each place: of a place's requests, each follows the last.

    A place has `turnover` requests, which is one if the workload does not say. Several have from half to one and a half
    of the workload's tokens, with the same sum at all places.
    """
    count, tokens = workload.get("turnover", 1), workload["tokens"]
    found = []
    for prompt in prompts(workload):
        rng = random.Random(str(prompt))
        parts = [rng.uniform(0.5, 1.5) for _ in range(count)]
        ends = [round(count * tokens * part / sum(parts)) for part in accumulate(parts)]
        lengths = [end - start for start, end in pairwise([0, *ends])]
        found.append([{**workload, "tokens": max(1, length), "prompt": prompt} for length in lengths])
    return found


def sampling(workload: dict[str, Any]) -> dict[str, Any]:
    """Sampling params of every request."""
    return {"max_tokens": workload["tokens"], "temperature": 0.0, "ignore_eos": True}


async def plain_round(llm: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """The workload's requests on a stock engine, outputs consumed as deltas; `at_once` of them, if it says so."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    began = time.perf_counter()
    firsts: list[float] = []
    gaps: list[float] = []
    every = successions(workload)
    turns = asyncio.Semaphore(workload.get("at_once", len(every)))

    async def one(requests: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for request in requests:
            params = SamplingParams(**sampling(request), output_kind=RequestOutputKind.DELTA)
            async with turns:
                steps = StepTimes(gaps)
                async for output in llm.generate({"prompt_token_ids": request["prompt"]}, params, uuid.uuid4().hex):
                    if not ids:
                        firsts.append(time.perf_counter() - began)
                    ids += output.outputs[0].token_ids
                    steps.note(len(output.outputs[0].token_ids), time.perf_counter())
        return ids

    found = await asyncio.gather(*(one(requests) for requests in every))
    marks = {"first_output": min(firsts), "joined": max(firsts) - min(firsts)}
    return {
        "tokens": sum(map(len, found)),
        "gaps": gaps,
        "marks_ms": {name: round(1000 * seconds, 1) for name, seconds in marks.items()},
        # The same for the same tokens of all requests.
        "digest": hashlib.sha256(json.dumps(found).encode()).hexdigest(),
    }


def draft_counts() -> dict[str, int]:
    """How many tokens the `AsyncLLM` of this process has drafted, and how many of them it took, by its own metrics."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = {"drafted": 0, "taken": 0}
    names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "taken"}
    for metric in get_metrics_snapshot():
        if metric.name in names:
            found[names[metric.name]] += metric.value
    return found


def saved_items(workload: dict[str, Any], steps: int) -> int | None:
    """How many items `kept` of the workload's block holds after `steps` steps; none if it is no list."""
    return {"last": steps * len(workload["layers"]), "topk": steps}.get(workload["saves"])


def check_saves(workload: dict[str, Any], saves: dict[str, Any], prompt: list[int], tokens: int) -> None:
    """Raise if a finished request of nnsight's did not bring what its block saved."""
    if workload["saves"] == "none":
        return
    found, wanted = len(saves["kept"]), saved_items(workload, tokens)
    if found != (len(prompt) if wanted is None else wanted):
        raise RuntimeError(f"nnsight brought {found} items of {tokens} tokens, a prompt of {len(prompt)}")


async def nnsight_round(model: Any, workload: dict[str, Any], *, each: bool) -> dict[str, Any]:
    """The workload by nnsight's async backend; with `each`, a collect RPC on every output as well.

    Each output of that then has what was saved so far, as each output had it in nnsight's first async design. The
    finished output's saves are nnsight's own collect in both ways, and are checked for their length.
    """
    from nnsight.modeling.vllm.engines.engine import merge_collected

    layers = workload["layers"]

    async def one(prompt: list[int]) -> int:
        if workload["saves"] == "none":
            with model.trace(prompt, **sampling(workload)) as tracer:
                pass
        elif workload["saves"] == "topk":
            with model.trace(prompt, **sampling(workload)) as tracer:
                kept = [].save()
                for _ in tracer.iter[:]:
                    kept.append(model.logits[-1].topk(5).indices.clone())
        elif workload["saves"] == "prompt":
            with model.trace(prompt, **sampling(workload)) as tracer:
                kept = model.model.layers[layers[0]].output[0].clone().save()
        else:
            with model.trace(prompt, **sampling(workload)) as tracer:
                kept = [].save()
                for _ in tracer.iter[:]:
                    for layer in layers:
                        kept.append(model.model.layers[layer].output[0][-1].clone())
        tokens, collected, output = 0, 0, None
        backend = tracer.backend
        async for output in backend:
            tokens = len(output.outputs[0].token_ids)
            if each and not output.finished:
                # Ask the workers what has been saved so far, and hand it to whoever reads the output.
                answers = await model.vllm_entrypoint.collective_rpc(
                    "collect_nnsight", args=([backend._request_id], None)
                )
                output.saves = merge_collected(answers)[backend._request_id]["saves"]
                found, wanted = len(output.saves.get("kept", ())), saved_items(workload, tokens)
                if wanted is not None and not max(collected, wanted) <= found:
                    raise RuntimeError(f"an RPC brought {found} items of {tokens} tokens, {collected} before")
                collected = found
        check_saves(workload, output.saves if output is not None else {}, prompt, tokens)
        return tokens

    return {"tokens": sum(await asyncio.gather(*(one(prompt) for prompt in prompts(workload))))}


def engine_arguments(options: dict[str, Any]) -> Any:
    """vLLM's arguments for the model under test, the same in every role."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=options["model"], **options["engine"])


async def serve(ready: dict[str, Any], run: Any) -> None:
    """Answer workloads until the end of the input."""
    print(json.dumps({"ready": ready}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        workload = json.loads(line)
        before, began = cpu_seconds(), time.perf_counter()
        answer = await run(workload)
        seconds = time.perf_counter() - began
        after = cpu_seconds()
        cpu = {kind: round(used - before.get(kind, 0.0), 3) for kind, used in after.items()}
        # A subscriber's own seconds leave out how long it waits for the others.
        print(json.dumps({"seconds": seconds, **answer, "cpu_s": cpu}), flush=True)


def plain(options: dict[str, Any]) -> None:
    """A stock `AsyncLLM`: at vLLM's defaults, or eager, or on vLLM's first model runner."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if options.get("first_runner"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(options)
    arguments.enforce_eager = options["eager"]
    if options.get("synchronous"):
        arguments.async_scheduling = False

    async def main() -> None:
        llm = AsyncLLM.from_engine_args(arguments)

        async def run(workload: dict[str, Any]) -> dict[str, Any]:
            answer = await plain_round(llm, workload)
            return {**answer, **draft_counts()} if arguments.speculative_config else answer

        try:
            await serve({}, run)
        finally:
            llm.shutdown()

    asyncio.run(main())


def subscriber(options: dict[str, Any]) -> None:
    """A client that submits its share of the requests of all workloads, follows them, and verifies what it folded."""
    import tracewire
    from benchmarks.overhead import tracewire_round

    async def main() -> None:
        async with tracewire.connect(options["url"]) as client:

            async def run(workload: dict[str, Any]) -> dict[str, Any]:
                return await tracewire_round(options["url"], workload, kept=client)

            await serve({}, run)

    asyncio.run(main())


def _serve_nnsight(model: Any) -> None:
    """Answer workloads with nnsight's async backend until the end of the input."""

    async def main() -> None:
        await serve({}, lambda workload: nnsight_round(model, workload, each=workload.get("each", False)))

    try:
        asyncio.run(main())
    finally:
        model.vllm_entrypoint.shutdown()
        model.vllm_entrypoint = None


def nnsight(options: dict[str, Any]) -> None:
    """nnsight's own async engine, as published: its model, its worker, its runner. On a CPU, see `nnsight_cpu.py`."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        from benchmarks.nnsight_cpu import CpuVLLM as Model

        # nnsight's tree without weights empties the accelerator's cache, which raises where there is none.
        _set_torch_accelerator_to_noop()
    else:
        from nnsight.modeling.vllm import VLLM as Model
    _serve_nnsight(Model(options["model"], mode="async", dispatch=True, taps=options["taps"], **options["engine"]))


def own(options: dict[str, Any]) -> None:
    """Tracewire's engine without the bus: what requests pay that have nothing to do with it."""
    from vllm.platforms import current_platform

    from tracewire_engine.launch.cpu_affinity import keep_off_workers
    from tracewire_engine.launch.engine_builder import build_engine
    from tracewire_engine.link.step_link import LinkReceiver

    async def main() -> None:
        async def drain() -> None:
            while True:
                await link.arrived()
                for _ in link.ready():
                    pass

        async def run(workload: dict[str, Any]) -> dict[str, Any]:
            answer = await plain_round(model.vllm_entrypoint, workload)
            counts = await model.vllm_entrypoint.engine_core.call_utility_async("tracewire_counts")
            return {**answer, "drafted": counts["drafted"], "taken": counts["taken"]}

        draining = asyncio.ensure_future(drain())
        await serve({}, run)
        draining.cancel()

    with LinkReceiver() as link:
        model = build_engine(engine_arguments(options), link.address, options["taps"])
        try:
            # As `tracewire engine` does.
            if current_platform.is_cpu():
                keep_off_workers()
            asyncio.run(main())
        finally:
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # nnsight's, which the plain role takes back.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    roles = {"plain": plain, "nnsight": nnsight, "own": own, "subscriber": subscriber}
    roles[sys.argv[1]](json.loads(sys.argv[2]))
