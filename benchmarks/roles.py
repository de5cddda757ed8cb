"""What runs in a process of its own during a benchmark: one engine each, driven by lines of JSON.

A role prints `{"ready": ...}` when its engine serves, then answers each line on its standard input, a workload, with
one line: seconds, tokens and CPU seconds by process. The parent alternates the roles, so that they share the
machine's moods.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from typing import Any

import psutil


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
    """Token ids of each request's prompt: different for each, the same in every role."""
    count, length = workload["concurrency"], workload["prompt_tokens"]
    return [[1 + (7 * request + 3 * index) % 200 for index in range(length)] for request in range(count)]


def sampling(workload: dict[str, Any]) -> dict[str, Any]:
    """Sampling params of every request."""
    return {"max_tokens": workload["tokens"], "temperature": 0.0, "ignore_eos": True}


async def plain_round(llm: Any, workload: dict[str, Any]) -> int:
    """The workload's requests on a stock engine, outputs consumed as deltas."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(prompt: list[int]) -> int:
        params = SamplingParams(**sampling(workload), output_kind=RequestOutputKind.DELTA)
        tokens = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts(workload))))


async def nnsight_round(model: Any, workload: dict[str, Any], *, each: bool) -> int:
    """The workload by nnsight's async backend; with `each`, a collect RPC on every output as well."""
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
        tokens = 0
        backend = tracer.backend
        async for output in backend:
            if each and not output.finished:
                # The way of a per-output collect: ask the workers after each output what has been saved so far.
                ids = [backend._request_id]
                await model.vllm_entrypoint.collective_rpc("collect_nnsight", args=(ids, None))
            tokens = len(output.outputs[0].token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts(workload))))


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
        tokens = await run(workload)
        seconds = time.perf_counter() - began
        after = cpu_seconds()
        cpu = {kind: round(used - before.get(kind, 0.0), 3) for kind, used in after.items()}
        print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu_s": cpu}), flush=True)


def plain(options: dict[str, Any]) -> None:
    """A stock `AsyncLLM`: at vLLM's defaults, or eager."""
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(options)
    arguments.enforce_eager = options["eager"]

    async def main() -> None:
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            await serve({}, lambda workload: plain_round(llm, workload))
        finally:
            llm.shutdown()

    asyncio.run(main())


def nnsight(options: dict[str, Any]) -> None:
    """nnsight's own async backend. On a CPU its worker refuses vLLM's runner; ours, reporting nothing, runs it."""
    from vllm.platforms import current_platform

    import tracewire_engine  # noqa: F401
    from tracewire_engine.model import EngineModel, build_engine

    if not current_platform.is_cpu():
        EngineModel._WORKER_CLS = "nnsight.modeling.vllm.workers.GPUWorker.NNsightGPUWorker"
    model = build_engine(engine_arguments(options), "", options["taps"])

    async def main() -> None:
        await serve({}, lambda workload: nnsight_round(model, workload, each=workload.get("each", False)))

    try:
        asyncio.run(main())
    finally:
        model.vllm_entrypoint.shutdown()
        model.vllm_entrypoint = None


def own(options: dict[str, Any]) -> None:
    """Tracewire's engine without the bus: what requests pay that have nothing to do with it."""
    from tracewire_engine.link import LinkReceiver
    from tracewire_engine.model import build_engine

    async def main() -> None:
        async def drain() -> None:
            while True:
                await link.arrived()
                link.ready()

        draining = asyncio.ensure_future(drain())
        await serve({}, lambda workload: plain_round(model.vllm_entrypoint, workload))
        draining.cancel()

    with LinkReceiver() as link:
        model = build_engine(engine_arguments(options), link.address, options["taps"])
        try:
            asyncio.run(main())
        finally:
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    {"plain": plain, "nnsight": nnsight, "own": own}[sys.argv[1]](json.loads(sys.argv[2]))
