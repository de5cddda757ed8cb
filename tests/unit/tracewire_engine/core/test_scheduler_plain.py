"""Plain requests are scheduled as by vLLM's own scheduler: the same steps, the same blocks, the same cache hits."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.schedulers import configuration, following
from tracewire_engine.core.scheduler import PausingAsyncScheduler, PausingScheduler

BLOCK = 8


class Loop:
    """EngineCore's loop around one scheduler, and all that it has decided."""

    def __init__(self, kind: Any, blocks: int, depth: int, spec: Any, *, caching: bool) -> None:
        config = configuration(chunked=True, caching=caching, tokens=24)
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = depth > 1
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        # As of a request's arrival, and not of the clock.
        self.arrivals = 0
        self.depth = depth
        self.queue: deque[Any] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.decided: list[Any] = []

    def add(self, name: str, prompt: list[int], count: int) -> None:
        self.tokens[name] = list(prompt)
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        self.arrivals += 1
        request = Request(name, prompt, params, None, arrival_time=self.arrivals, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def step(self) -> bool:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            cached = output.scheduled_cached_reqs
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed |= {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
            self.decided.append(
                (
                    dict(output.num_scheduled_tokens),
                    computed,
                    [data.block_ids for data in output.scheduled_new_reqs],
                    list(cached.new_block_ids),
                    sorted(cached.resumed_req_ids),
                    sorted(output.finished_req_ids),
                    self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                )
            )
            self.queue.appendleft((output, self._sampled(output.num_scheduled_tokens, computed)))
            if len(self.queue) < self.depth:
                return True
        if not self.queue:
            return False
        self.scheduler.update_from_output(*self.queue.pop())
        return True

    def _sampled(self, scheduled: dict[str, int], computed: dict[str, int]) -> Any:
        found = []
        for name, count in scheduled.items():
            tokens = self.tokens[name]
            if computed[name] + count < len(tokens):
                found.append([])
                continue
            tokens.append(following(tokens))
            found.append([tokens[-1]])
        places = {name: place for place, name in enumerate(scheduled)}
        return ModelRunnerOutput(req_ids=list(scheduled), req_id_to_index=places, sampled_token_ids=found)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True], ids=["no-cache", "cache"])
@pytest.mark.parametrize("window", [None, 12], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", range(6))
def test_each_step_is_as_vllm_decides_on_it(depth: int, caching: bool, window: int | None, seed: int) -> None:
    chance = random.Random(seed)
    more = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = FullAttentionSpec(**more) if window is None else SlidingWindowSpec(**more, sliding_window=window)
    theirs, ours = (Scheduler, PausingScheduler) if depth == 1 else (AsyncScheduler, PausingAsyncScheduler)
    # Few enough that some requests are preempted.
    blocks = chance.choice([9, 12, 30])
    loops = [Loop(kind, blocks, depth, spec, caching=caching) for kind in (theirs, ours)]
    starts = [[1 + (7 * place + 3 * start) % 50 for place in range(24)] for start in range(2)]
    left = 14
    while True:
        if left and chance.random() < 0.3:
            left -= 1
            start, length = chance.choice(starts), chance.randrange(4, 24)
            prompt = start[:length] + [chance.randrange(60, 90) for _ in range(chance.randrange(6))]
            count = chance.randrange(1, 40 - len(prompt))
            for loop in loops:
                loop.add(f"r{left}", prompt, count)
        going = [loop.step() for loop in loops]
        assert loops[0].decided[-1:] == loops[1].decided[-1:]
        assert going[0] == going[1]
        if not any(going) and not left:
            break
    assert loops[0].decided == loops[1].decided
    assert len(loops[0].decided) > 20
    assert loops[0].tokens == loops[1].tokens
