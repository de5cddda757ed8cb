"""vLLM's scheduler, which can also pause single requests, and knows those with interventions from plain ones.

Plain requests are scheduled as vLLM does: long prompts in chunks, what is cached of them not at all. A request with
interventions, a *traced* one, is different in three ways:

- Its prompt is computed in one step, since a block is to see it whole. When it does not fit beside what else a step
  would compute, the next step makes room for it: prompts that are under way in chunks rest, and the step may have as
  many tokens as the workers can take, as far as they are needed.
- Its KV blocks never enter the prefix cache. What is computed under an edit serves nobody else, and blocks without a
  future are the first to be used again, so that they do not push out what plain requests share.
- When it is preempted, the workers copy its KV blocks to the host (`kv_offload.py`) and back when it goes on. It is not
  computed anew, and what it reads and edits is what it would have been.

The workers zero the KV blocks that a traced request leaves, before anybody else writes to them (`kv_offload.py` says
why).

A paused request is not scheduled, and takes neither a step's tokens nor a place among the running requests. It stays in
vLLM's own queues, where an abort, and a token that is still on its way, find it. Only while vLLM decides on a step, or
counts what is left to do, is it set aside from them. Its KV blocks stay its own until somebody finds none free: then
paused requests are preempted first.

An engine that has nothing but paused requests is idle to vLLM, and waits for messages. It makes one step without tokens
before, so that the workers report the last step that had any.

With each step the workers are told how many tokens those traced requests have put out that ended since the last one.
They may have been in later steps: an abort, and with async scheduling any end, comes when the next step is under way.

EngineCore builds the scheduler from a dotted path, [`pausing_scheduler`][], and answers the utility calls
`tracewire_pause`, `tracewire_resume`, `tracewire_hold` (which pauses all there are, and all that come),
`tracewire_end` (which aborts requests and tells how many tokens each has) and `tracewire_counts` from then on.
A step that has been given to the workers is not called back: a pause takes hold after at most one such step, or two
with async scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.request import RequestStatus

from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, EDITS_ARG, KEPT_BYTES, STEP_TOKENS

__all__ = ["PausingAsyncScheduler", "PausingScheduler", "pausing_scheduler"]

#: How many bytes of KV a worker keeps of preempted requests, unless `additional_config` says otherwise.
_KEPT_BYTES = 8 << 30

#: A full block enters the prefix cache with an allocation as soon as its last token is known, which is up to two steps
#: after the one that computes it was decided on. (With more steps under way, it does with the token's output.)
_LATE = 2

#: vLLM's queues of requests that do not run: each version has two of them.
_WAITING = ("waiting", "kv_holding_waiting", "skipped_waiting")


#: The context of most steps, which is entered several times a step at no cost.
_AS_IT_IS = nullcontext()


class _Pausing:
    """The additions to either of vLLM's schedulers."""

    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    scheduler_config: Any
    lora_config: Any
    vllm_config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracewire_paused: set[Any] = set()
        #: Whether all are, those to come included.
        self.tracewire_held = False
        #: Requests hidden from vLLM among the running ones. vLLM may take blocks from them, the last first.
        self.tracewire_aside: list[Any] = []
        self.tracewire_preempted: list[Any] = []
        extra = self.vllm_config.additional_config
        if self.scheduler_config.enable_chunked_prefill:
            self.max_num_scheduled_tokens = min(
                self.max_num_scheduled_tokens, extra.get(STEP_TOKENS, self.max_num_scheduled_tokens)
            )
        #: Whether the last step had tokens.
        self.tracewire_stepped = False
        #: The traced request that did not fit what the last step had left.
        self.tracewire_unfit: Any = None
        #: Which KV blocks the workers are to copy to the host before the next step, by request, a list for each group
        #: (0: none at that place); and whose they hold: how many.
        self.tracewire_leaving: dict[str, list[list[int]]] = {}
        self.tracewire_kept: dict[Any, int] = {}
        self.tracewire_preemptions = self.tracewire_steps = 0
        #: How many tokens each traced request has put out that ended since the last step.
        self.tracewire_ends: dict[str, int] = {}
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        self._allocate = manager.allocate_slots
        # The one place where running and waiting requests alike learn that there are no free blocks.
        manager.allocate_slots = self._allocate_slots
        #: Which KV blocks traced requests have, and which of those that they left the workers have not zeroed.
        self.tracewire_edited: set[int] = set()
        self.tracewire_unclean: list[int] = []
        self._for_traced = False
        pool: Any = manager.block_pool
        self._take_from_pool, self._give_to_pool = pool.get_new_blocks, pool.free_blocks
        pool.get_new_blocks, pool.free_blocks = self._taken_blocks, self._given_blocks
        coordinator: Any = manager.coordinator
        #: How many positions a block holds where one more token can need nothing but a block, and 1 elsewhere; how many
        #: full blocks of each request are in the prefix cache; and what an allocation of nothing returns.
        self._block_size, self._cached = 1, None
        self._nothing: Any = manager.empty_kv_cache_blocks
        if self.vllm_config.speculative_config is None and _is_simple(manager):
            (simple,) = coordinator.single_type_managers
            self._block_size, self._cached = simple.block_size, simple.num_cached_block
        self._cache = coordinator.cache_blocks
        # Through which all blocks go into the prefix cache.
        coordinator.cache_blocks = self._cache_blocks
        groups: Any = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        self._keepable = int(extra.get(KEPT_BYTES, _KEPT_BYTES) / _block_bytes(groups)) if _can_keep(groups) else 0

    def pause_requests(self, request_ids: Iterable[str]) -> int:
        """Leave these out of every step until they are resumed; returns how many of them there still are."""
        found = {self.requests[request_id] for request_id in request_ids if request_id in self.requests}
        alive = {request for request in found if not request.is_finished()}
        self.tracewire_paused |= alive
        return len(alive)

    def resume_requests(self, request_ids: Iterable[str]) -> int:
        """Let these go on; returns how many of them were paused."""
        names = set(request_ids)
        found = {request for request in self.tracewire_paused if request.request_id in names}
        found = {request for request in found if not request.is_finished()}
        self.tracewire_paused -= found
        return len(found)

    def hold(self, on: bool) -> None:
        """Leave all requests out of every step, or all but the paused in again."""
        self.tracewire_held = on

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's next step, without the paused."""
        with self._set_aside(), self._make_room():
            output: Any = super().schedule(*args, **options)  # type: ignore[misc]
        self.tracewire_stepped = output.total_num_scheduled_tokens > 0
        self.tracewire_steps += self.tracewire_stepped
        # The workers look for it before they write to any block.
        output.tracewire_leaving, self.tracewire_leaving = self.tracewire_leaving, {}
        output.tracewire_ends, self.tracewire_ends = self.tracewire_ends, {}
        output.tracewire_unclean, self.tracewire_unclean = self.tracewire_unclean, []
        return output

    def tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """How many tokens each of these has put out, of those that have not ended."""
        found = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        return {request.request_id: request.num_output_tokens for request in found if not request.is_finished()}

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        if not _is_plain(request):
            self.tracewire_ends[request.request_id] = request.num_output_tokens
        return super()._free_request(request, *args, **options)  # type: ignore[misc]

    def counts(self) -> dict[str, int]:
        """The contents of the queues and of the KV cache, for tests and for the search for leaks."""
        pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        return {
            "requests": len(self.requests),
            "paused": len(self._still_paused()),
            "kept": len(self._still_kept()),
            "preemptions": self.tracewire_preemptions,
            "steps": self.tracewire_steps,
            # One is vLLM's own, which stands for no block.
            "blocks": pool.num_gpu_blocks - 1,
            "free_blocks": pool.get_num_free_blocks(),
        }

    def get_num_unfinished_requests(self) -> int:
        """How many requests there is something to do for."""
        with self._set_aside():
            count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return count

    def has_requests(self) -> bool:
        """Whether to make a step."""
        return bool(super().has_requests()) or (self.tracewire_stepped and bool(self._still_paused()))  # type: ignore[misc]

    def _still_paused(self) -> set[Any]:
        if any(request.is_finished() for request in self.tracewire_paused):
            self.tracewire_paused = {request for request in self.tracewire_paused if not request.is_finished()}
        if self.tracewire_held:
            return {request for request in self.requests.values() if not request.is_finished()}
        return self.tracewire_paused

    def _set_aside(self) -> AbstractContextManager[None]:
        """Show vLLM its queues without the paused, and no more running requests than it may have.

        There can be more: while a request was paused, its place was another's. It then waits for one, blocks and all.
        """
        paused, limit = self._still_paused(), self._places()
        if self.lora_config is not None:
            paused = paused | self._beyond_loras(paused)
        return self._without(paused, limit) if paused or len(self.running) > limit else _AS_IT_IS

    def _beyond_loras(self, paused: set[Any]) -> set[Any]:
        """Running requests of more LoRA adapters than a step may have: who came first goes first.

        While a request was paused, another adapter's got the place of its own.
        """
        using = [one for one in self.running if one.lora_request is not None and one not in paused]
        taken: set[int] = set()
        for one in sorted(using, key=lambda one: one.arrival_time):
            if len(taken) < self.lora_config.max_loras:
                taken.add(one.lora_request.lora_int_id)
        return {one for one in using if one.lora_request.lora_int_id not in taken}

    @contextmanager
    def _without(self, paused: set[Any], limit: int) -> Iterator[None]:
        running = [request for request in self.running if request not in paused]
        aside = self.tracewire_aside = running[limit:] + [request for request in self.running if request in paused]
        self.running = running[:limit]
        taken: list[tuple[Any, list[Any]]] = []
        if not paused.issubset(aside):
            queues: list[Any] = [getattr(self, name, ()) for name in _WAITING]
            for queue in queues:
                out = [request for request in queue if request in paused]
                if out:
                    queue.remove_requests(out)
                    taken.append((queue, out))
        try:
            yield
        finally:
            # Behind those that ran meanwhile; waiting ones before those that wait.
            self.running.extend(aside)
            for queue, out in taken:
                queue.prepend_requests(reversed(out))
            self.waiting.prepend_requests(self.tracewire_preempted)
            self.tracewire_aside, self.tracewire_preempted = [], []

    def _places(self) -> int:
        """How many requests may run at once."""
        return getattr(self, "max_num_active_reqs", None) or self.max_num_running_reqs

    def _make_room(self) -> AbstractContextManager[None]:
        """Show vLLM a step in which the traced prompt fits that did not fit the last one, if there is one.

        Prompts under way in chunks rest for the step; if the others' tokens are too many beside it, they do too.
        """
        request, self.tracewire_unfit = self.tracewire_unfit, None
        if request is None or request.is_finished() or len(self.running) >= self._places():
            return _AS_IT_IS
        return self._room_for(request)

    @contextmanager
    def _room_for(self, request: Any) -> Iterator[None]:
        config, usual = self.scheduler_config, self.max_num_scheduled_tokens
        threshold = config.long_prefill_token_threshold
        needed = request.num_tokens - request.num_computed_tokens
        before = list(self.running)
        going = [one for one in before if _tokens_left(one) <= 1]
        if needed + len(going) > config.max_num_batched_tokens:
            going = []
        self.running = list(going)
        places = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        limit = getattr(self, places)
        setattr(self, places, limit - (len(before) - len(going)))
        self.max_num_scheduled_tokens = max(usual, needed + len(going))
        config.long_prefill_token_threshold = 0
        try:
            yield
        finally:
            self.max_num_scheduled_tokens, config.long_prefill_token_threshold = usual, threshold
            setattr(self, places, limit)
            # In their order, without the preempted ones; new requests come behind them.
            gone = set(going) - set(self.running)
            fresh = [one for one in self.running if one not in going]
            self.running = [one for one in before if one not in gone] + fresh

    def _victim(self) -> Any:
        """The request to preempt among those set aside: the last without interventions, or else the last."""
        aside = self.tracewire_aside
        return aside.pop(next((place for place in range(len(aside) - 1, -1, -1) if _is_plain(aside[place])), -1))

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        """vLLM's allocation, which finds the blocks of those set aside when there are no others.

        A traced prompt gets blocks as a whole, or none yet. Most tokens of a request that generates have a place in a
        block that it has: that is not asked for.
        """
        # Of each request in each step, so as few questions as can be.
        if request.status is not RequestStatus.RUNNING:
            if not _is_plain(request) and self._is_cut(request, num_new_tokens, *args, **options):
                self.tracewire_unfit = request
                return None
            if request in self.tracewire_kept and request.num_computed_tokens:
                return self._allocate_kept(request, num_new_tokens, *args, **options)
        elif num_new_tokens == 1 and (request.num_computed_tokens + 1) % self._block_size > _LATE:
            return self._nothing
        return self._allocate_or_take(request, num_new_tokens, *args, **options)

    def _allocate_kept(self, request: Any, *args: Any, **options: Any) -> Any:
        """Blocks of a request that goes on with what the workers kept of it: as if its KV came from elsewhere."""
        options["num_external_computed_tokens"] = computed = request.num_computed_tokens
        request.num_computed_tokens = 0
        try:
            return self._allocate_or_take(request, *args, **options)
        finally:
            request.num_computed_tokens = computed

    def _is_cut(self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, **options: Any) -> bool:
        """Whether vLLM would compute only a part of what is to be computed of a request that is about to run."""
        computed = (
            request.num_computed_tokens + num_new_computed_tokens + options.get("num_external_computed_tokens", 0)
        )
        left: int = request.num_tokens - computed
        most: int = self.scheduler_config.max_num_batched_tokens
        # What no step can take is let through, so that it does not stand in everybody's way.
        return num_new_tokens < left <= most

    def _allocate_or_take(self, request: Any, *args: Any, **options: Any) -> Any:
        """vLLM's allocation, with the blocks of those set aside while there are no others."""
        blocks = self._allocate_for(request, *args, **options)
        while blocks is None and self.tracewire_aside:
            victim = self._victim()
            self._preempt_request(victim, time.monotonic())
            # Not to be scheduled in this very step.
            self.waiting.remove_request(victim)
            self.tracewire_preempted.append(victim)
            blocks = self._allocate_for(request, *args, **options)
        return blocks

    def _allocate_for(self, request: Any, *args: Any, **options: Any) -> Any:
        """vLLM's allocation; what a traced request is given is noted as its own."""
        self._for_traced = not _is_plain(request)
        try:
            return self._allocate(request, *args, **options)
        finally:
            self._for_traced = False

    def _taken_blocks(self, *args: Any, **options: Any) -> list[Any]:
        """vLLM's own allocation of free blocks, for any request."""
        blocks: list[Any] = self._take_from_pool(*args, **options)
        if self._for_traced:
            self.tracewire_edited.update([block.block_id for block in blocks])
        return blocks

    def _given_blocks(self, blocks: Iterable[Any], *args: Any, **options: Any) -> None:
        """vLLM's way of giving them back: at a request's end, when it is preempted, and behind a sliding window."""
        edited = self.tracewire_edited
        if not edited:
            self._give_to_pool(blocks, *args, **options)
            return
        freed = list(blocks)
        self._give_to_pool(freed, *args, **options)
        for block in freed:
            if block.block_id in edited and not block.ref_cnt:
                edited.remove(block.block_id)
                self.tracewire_unclean.append(block.block_id)

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """vLLM's way into the prefix cache, for plain requests with a block that is not there yet."""
        cached = self._cached
        if cached is not None and num_computed_tokens // self._block_size <= cached.get(request.request_id, 0):
            return
        if _is_plain(request):
            self._cache(request, num_computed_tokens)

    def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
        """vLLM's, which forgets what was computed; of a traced request, the workers keep it."""
        computed = request.num_computed_tokens
        held: list[list[int]] = []
        # vLLM 0.25 lets a preempted request go on whatever is still on its way: one token is there by then.
        settled = hasattr(request, "num_stale_output_tokens") or request.num_output_placeholders <= 1
        # Dropped, it is because the KV is no longer valid.
        if not _is_plain(request) and computed and settled and not options.get("drop_stale_output", False):
            held = self._held(request.request_id, computed)
        super()._preempt_request(request, *args, **options)  # type: ignore[misc]
        self.tracewire_preemptions += 1
        self.tracewire_kept.pop(request, None)
        blocks = sum(block != 0 for group in held for block in group)
        if blocks and sum(self._still_kept().values()) + blocks <= self._keepable:
            request.num_computed_tokens = computed
            self.tracewire_kept[request] = blocks
            self.tracewire_leaving[request.request_id] = held

    def _held(self, request_id: str, computed: int) -> list[list[int]]:
        """The blocks with the first `computed` tokens of a request, by group; 0 where a sliding window has left one."""
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        sizes = [one.block_size for one in manager.coordinator.single_type_managers]
        pairs = zip(manager.get_block_ids(request_id), sizes, strict=True)
        return [list(blocks[: -(-computed // size)]) for blocks, size in pairs]

    def _still_kept(self) -> dict[Any, int]:
        """How many blocks the workers hold of each preempted request."""
        kept = self.tracewire_kept
        for request in [one for one in kept if one.is_finished() or one.status != RequestStatus.PREEMPTED]:
            del kept[request]
        return kept


def _is_simple(manager: Any) -> bool:
    """Whether all that a KV cache holds of a request are blocks of positions that stay until its end, of one kind."""
    managers = manager.coordinator.single_type_managers
    return (
        len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and managers[0].block_pool.hash_block_size == managers[0].block_size
    )


def _specs(group: Any) -> list[Any]:
    """The contents of a block for each layer of a KV cache group."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [group.kv_cache_spec] * len(group.layer_names)


def _can_keep(groups: Any) -> bool:
    """Whether what a request has computed is in its blocks and nowhere else, as it was after its last step.

    Attention's are blocks of positions. A recurrent layer has one, with its state, unless states are cached for others.
    """
    return bool(groups) and all(
        isinstance(spec, AttentionSpec)
        or (isinstance(spec, MambaSpec) and getattr(spec, "mamba_cache_mode", "none") == "none")
        for group in groups
        for spec in _specs(group)
    )


def _block_bytes(groups: Any) -> int:
    """How many bytes a block has, in all layers of a worker."""
    size: int = max(sum(spec.page_size_bytes for spec in _specs(group)) for group in groups)
    return size


def _tokens_left(request: Any) -> int:
    """How many tokens of a running request are to be computed: 1 when it generates."""
    left: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return left


def _is_plain(request: Any) -> bool:
    plain: bool | None = getattr(request, "tracewire_plain", None)
    if plain is None:
        # Found out once: it is asked of each request in each step.
        arguments = getattr(request.sampling_params, "extra_args", None) or {}
        plain = request.tracewire_plain = arguments.keys().isdisjoint((BLOCK_ARG, DECLARED_ARG, EDITS_ARG))
    return plain


class PausingScheduler(_Pausing, Scheduler):
    """vLLM's scheduler that knows each step's tokens before it decides on the next."""


class PausingAsyncScheduler(_Pausing, AsyncScheduler):
    """vLLM's scheduler that decides on a step while the one before runs."""


def _pause(core: Any, request_ids: list[str]) -> int:
    count: int = core.scheduler.pause_requests(request_ids)
    return count


def _resume(core: Any, request_ids: list[str]) -> int:
    count: int = core.scheduler.resume_requests(request_ids)
    return count


def _hold(core: Any, on: bool) -> None:
    core.scheduler.hold(on)


def _end(core: Any, request_ids: list[str]) -> dict[str, int]:
    tokens: dict[str, int] = core.scheduler.tokens(request_ids)
    core.abort_requests(request_ids)
    return tokens


def _counts(core: Any) -> dict[str, int]:
    counts: dict[str, int] = core.scheduler.counts()
    return counts


def pausing_scheduler(vllm_config: Any, **options: Any) -> _Pausing:
    """Make EngineCore's scheduler, and let EngineCore answer calls about it: what `scheduler_cls` names."""
    EngineCore.tracewire_pause, EngineCore.tracewire_resume, EngineCore.tracewire_hold = _pause, _resume, _hold
    EngineCore.tracewire_counts, EngineCore.tracewire_end = _counts, _end
    kind = PausingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PausingScheduler
    return kind(vllm_config=vllm_config, **options)
