"""vLLM's own schedulers without an engine: a made-up model and worker stand behind them.

The made-up worker keeps what vLLM's keeps, and checks what it is told: which tokens a request has, which are computed,
and whose KV is in a block.
"""

# mypy: ignore-errors

from __future__ import annotations

import os
from collections import deque
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support import ROOT
from tracewire_engine.core.scheduler import pausing_scheduler
from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, DRAFTS_ARG, FORCED_ARG

__all__ = ["BLOCK", "LENGTH", "PLACES", "Core", "alone", "configuration", "prompt"]

MODEL = ROOT / "examples" / "demo_model" / "model"
BLOCK, PLACES, LENGTH = 4, 3, 48


def following(tokens: list[int]) -> int:
    """The made-up model: the token after these."""
    return (sum(place * token for place, token in enumerate(tokens, 1)) * 2654435761 >> 7) % 1000 + 1


def prompt(number: int, length: int) -> list[int]:
    """A prompt that shares nothing with another's."""
    return [1000 * number + place for place in range(length)]


def alone(prompt: list[int], count: int) -> list[int]:
    """What a request of its own generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


def configuration(*, chunked: bool = False, caching: bool = False, tokens: int = 64, drafts: int = 0) -> Any:
    """vLLM's configuration of an engine with few places and short texts, whose workers take `tokens` in a step.

    `drafts` tokens are drafted for a request's step.
    """
    arguments = AsyncEngineArgs(
        model=str(MODEL), max_num_seqs=PLACES, max_model_len=LENGTH, max_num_batched_tokens=tokens, block_size=16
    )
    if drafts:
        arguments.speculative_config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    # vLLM makes a configuration for its second runner only where Triton is; the scheduler asks for the runner later.
    with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="0"):
        config = arguments.create_engine_config()
    config.scheduler_config.enable_chunked_prefill = chunked
    config.cache_config.enable_prefix_caching = caching
    config.cache_config.block_size = BLOCK
    return config


class Worker:
    """What vLLM's worker and ours keep of requests, and a model that is right only if that is."""

    def __init__(self, traced: set[str], *, second: bool = False, drafts: int = 0, placeholders: bool = False) -> None:
        self.traced = traced
        #: How many tokens it drafts; whether the scheduler has placeholders for them; and those of the last step.
        self.drafts, self.placeholders = drafts, placeholders
        self.drafted: dict[str, list[int]] = {}
        #: By request, how many drafts each of its steps had, and how many were taken.
        self.tried: dict[str, list[tuple[int, int]]] = {}
        #: Whether it stands for vLLM's second model runner.
        self.second = second
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        #: By block, what is in each of its slots: whose edits, and the tokens that it was computed of.
        self.slots: dict[int, list[Any]] = {}
        self.batch: set[str] = set()
        self.kept: dict[str, list[Any]] = {}
        #: How many tokens each request had in each of its steps.
        self.counts: dict[str, list[int]] = {}
        #: How many of its tokens each request found computed when it came.
        self.cached: dict[str, int] = {}

    def _restore(self, name: str) -> None:
        """Write what was kept of a preempted request to the blocks that it has now."""
        for block, slots in zip(self.blocks[name], self.kept.pop(name, []), strict=False):
            self.slots[block] = slots

    def _tried(self, name: str, given: list[int]) -> list[int]:
        """The drafts of a request's step, which the scheduler gives or has placeholders for.

        Those of placeholders are of the step before.
        """
        if not self.placeholders:
            return list(given)
        assert set(given) == {-1}
        if len(self.tokens[name]) > self.prompts[name]:
            assert name in self.drafted, "placeholders for drafts that nobody has"
        # vLLM pads the first step of a request with placeholders.
        return self.drafted.get(name, given)[: len(given)]

    def _sample(self, name: str, drafts: list[int]) -> list[int]:
        """What a step of a request samples: the drafts up to the first that is wrong, and one more. Drafts the next."""
        tokens, found = self.tokens[name], []
        for draft in [*drafts, None]:
            tokens.append(following(tokens))
            found.append(tokens[-1])
            if tokens[-1] != draft:
                break
        if drafts:
            self.tried.setdefault(name, []).append((len(drafts), len(found) - 1))
        # Right ones, then a wrong one: none, one, two or all of them are right.
        ahead = alone(tokens, self.drafts)
        right = tokens[-1] % (self.drafts + 1)
        self.drafted[name] = [token if place < right else token + 1 for place, token in enumerate(ahead)]
        return found

    def execute(self, output: Any) -> Any:
        for name in output.finished_req_ids:
            self.kept.pop(name, None)
        for name, (held,) in output.tracewire_leaving.items():
            if name in self.tokens and name not in output.finished_req_ids:
                assert held == self.blocks[name][: len(held)]
                self.kept[name] = [list(self.slots[block]) for block in held]
        for block in output.tracewire_unclean:
            self.slots.pop(block, None)
        for name in output.finished_req_ids:
            self.tokens.pop(name, None)
            self.blocks.pop(name, None)
        self.batch -= output.finished_req_ids
        scheduled = output.num_scheduled_tokens
        before, self.batch = self.batch, set(scheduled)
        computed = {}
        for data in output.scheduled_new_reqs:
            computed[data.req_id] = data.num_computed_tokens
            self.blocks[data.req_id] = list(data.block_ids[0])
            if data.req_id in self.tokens:
                # vLLM's second runner: a preempted request comes back as a new one, with all of its tokens.
                assert list(data.prefill_token_ids) == self.tokens[data.req_id], "a token was still on its way"
                self._restore(data.req_id)
                continue
            self.tokens[data.req_id] = list(data.prompt_token_ids)
            self.prompts[data.req_id] = len(data.prompt_token_ids)
            self.cached[data.req_id] = data.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            computed[name] = cached.num_computed_tokens[place]
            new = cached.new_block_ids[place]
            if name in cached.resumed_req_ids:
                assert name not in before
                self.blocks[name] = []
            if name not in before and not self.second:
                # As vLLM's worker does with async scheduling: it takes the tokens that it is told.
                assert list(cached.all_token_ids[name]) == self.tokens[name], "a token was still on its way"
            self.blocks[name].extend(new[0] if new else [])
            if name in cached.resumed_req_ids:
                self._restore(name)
        sampled = []
        tried = {name: self._tried(name, given) for name, given in output.scheduled_spec_decode_tokens.items()}
        self.drafted = {}
        for name, count in scheduled.items():
            blocks, first = self.blocks[name], computed[name]
            drafts = tried.get(name, [])
            tokens = self.tokens[name] + drafts
            if self.placeholders and self.drafts and len(self.tokens[name]) > self.prompts[name]:
                # The scheduler does not know yet how many drafts of the step before were taken.
                first = min(first, len(self.tokens[name]) - 1)
            whose = name if name in self.traced else ""
            self.counts.setdefault(name, []).append(count)
            for position in range(first, first + count):
                slots = self.slots.setdefault(blocks[position // BLOCK], [None] * BLOCK)
                slots[position % BLOCK] = (whose, tuple(tokens[: position + 1]))
            for position in range(first + count):
                there = self.slots[blocks[position // BLOCK]][position % BLOCK]
                assert there == (whose, tuple(tokens[: position + 1])), "another's KV"
            # An attention kernel may read what is in its last block behind its tokens.
            behind = self.slots[blocks[(first + count - 1) // BLOCK]]
            assert {slot[0] for slot in behind if slot is not None} <= {"", whose}, "what a trace left behind"
            if first + count < len(tokens):
                sampled.append([])
                continue
            assert first + count == len(tokens), "a step of tokens that nobody has"
            sampled.append(self._sample(name, drafts))
        names = list(scheduled)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)}, sampled_token_ids=sampled
        )


class Core:
    """EngineCore's loop: one step at a time, or one decided on while the one before runs."""

    def __init__(self, config: Any, blocks: int, depth: int, policy: str) -> None:
        config.scheduler_config.async_scheduling = depth > 1
        config.scheduler_config.policy = policy
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler: Any = pausing_scheduler(
            config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        assert isinstance(self.scheduler, AsyncScheduler) == (depth > 1)
        self.traced: set[str] = set()
        self.worker = Worker(
            self.traced,
            second=config.use_v2_model_runner,
            drafts=config.num_speculative_tokens,
            placeholders=depth > 1,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256) if config.cache_config.enable_prefix_caching else None
        self.queue: deque[Any] = deque()
        self.depth = depth
        self.generated: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        #: Steps made, with whom.
        self.steps: list[set[str]] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        count: int,
        priority: int = 0,
        *,
        traced: bool = False,
        lora: int = 0,
        forced: int = 0,
        drafted: bool = False,
    ) -> None:
        """A request; one that is traced as the adapter gives it to the engine. Its first `forced` tokens are given.

        A traced one is `drafted` if it has declared interventions that each row has for itself.
        """
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        params.extra_args = {FORCED_ARG: [0] * forced} if forced else {}
        if traced:
            self.traced.add(name)
            params.extra_args |= {DECLARED_ARG: b"", DRAFTS_ARG: True} if drafted else {BLOCK_ARG: b""}
            params.skip_reading_prefix_cache = True
        self.generated[name] = []
        request = Request(name, prompt, params, None, priority=priority, block_hasher=self.hasher)
        if traced:
            request.cache_salt = name
        if lora:
            request.lora_request = LoRARequest(f"adapter {lora}", lora, "/nowhere")
        self.scheduler.add_request(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.steps.append(set(output.num_scheduled_tokens))
            self.queue.appendleft((output, self.worker.execute(output)))
            if len(self.queue) < self.depth and (self.steps[-1] or self.scheduler.has_requests()):
                return
        if self.queue:
            for outputs in self.scheduler.update_from_output(*self.queue.pop()).values():
                for output in outputs.outputs:
                    self.generated[output.request_id] += output.new_token_ids
                    if output.finish_reason is not None:
                        self.finished[output.request_id] = str(output.finish_reason)
            if self.worker.drafts and self.depth == 1:
                # As EngineCore does behind a step.
                drafts = self.worker.drafted
                self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def settle(self, limit: int = 200) -> None:
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def count(self, name: str) -> int:
        """In how many steps a request has been."""
        return sum(name in step for step in self.steps)
