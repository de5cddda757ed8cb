"""What the engine's scheduler costs a step beside vLLM's own, without a model.

    python -m benchmarks.scheduling [--requests 32] [--tokens 128] [--rounds 9] [--json]

Plain requests that generate, with async scheduling, prefix caching and chunked prefill, as engines have them. Ours
knows paused and traced requests besides and takes requests by priority. Microseconds of a step in EngineCore, deciding
upon it and taking its outputs in together: the median over alternating rounds.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import at_least, show

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo_model" / "model"
BLOCK = 16


def scheduler_of(config: Any, kind: Any, blocks: int) -> Any:
    """A scheduler of a model of one layer."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def microseconds_a_step(scheduler: Any, hasher: Any, requests: int, tokens: int, name: str) -> float:
    """Run requests to their ends, two steps under way at a time as EngineCore has it."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    for number in range(requests):
        prompt = [1 + (7 * number + 3 * place) % 200 for place in range(16)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add_request(Request(f"{name}-{number}", prompt, params, None, block_hasher=hasher))
    under_way: deque[Any] = deque()
    steps, spent = 0, 0.0
    while scheduler.has_requests() or under_way:
        began = time.perf_counter()
        output = scheduler.schedule() if scheduler.has_requests() else None
        spent += time.perf_counter() - began
        if output is not None:
            names = list(output.num_scheduled_tokens)
            index = {request: place for place, request in enumerate(names)}
            result = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=[[7] for _ in names])
            under_way.append((output, result))
            if len(under_way) < 2 and names:
                continue
        began = time.perf_counter()
        scheduler.update_from_output(*under_way.popleft())
        spent += time.perf_counter() - began
        steps += 1
    return 1e6 * spent / steps


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=at_least(1), default=32)
    parser.add_argument("--tokens", type=at_least(1), default=128)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tracewire_engine.core.scheduler import pausing_scheduler

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    blocks = 16 + options.requests * (16 + options.tokens + BLOCK) // BLOCK
    schedulers: dict[str, Any] = {}
    for name, kind, policy in (("vllm", AsyncScheduler, "fcfs"), ("tracewire", pausing_scheduler, "priority")):
        arguments = AsyncEngineArgs(
            model=str(MODEL), max_num_seqs=options.requests, max_model_len=2048, block_size=BLOCK
        )
        config = arguments.create_engine_config()
        config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = True
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.policy = policy
        config.cache_config.num_gpu_blocks = blocks
        schedulers[name] = scheduler_of(config, kind, blocks)
    found: dict[str, list[float]] = {name: [] for name in schedulers}
    for number in range(options.rounds + 1):
        for name, scheduler in schedulers.items():
            spent = microseconds_a_step(scheduler, hasher, options.requests, options.tokens, f"{number}")
            if number:
                found[name].append(spent)
    ratio = median(ours / theirs for theirs, ours in zip(*found.values(), strict=True))
    figures = {f"{name}_us": round(median(spents), 1) for name, spents in found.items()}
    show({**figures, "ratio": round(ratio, 3)}, as_json=options.json)


if __name__ == "__main__":
    main()
