"""Extends vLLM's scheduler: it can pause single requests, and treats requests with interventions differently.

vLLM schedules plain requests as usual: long prompts in chunks, and cached prefixes not at all. A request with
interventions, a *traced* request, differs in three ways:

- Its prompt is computed in one step, because a block must see it whole. If it does not fit into a step beside the other
  requests, the scheduler makes room in the next step. Prompts that are being computed in chunks rest for that step, and
  the step may have more tokens than usual, up to the number that the workers can take.
- Its KV blocks never enter the prefix cache, because values computed under an edit are of no use to other requests.
  vLLM reuses uncached KV blocks first, so they do not push out prefixes that plain requests share.
- If it is preempted, the workers copy its KV blocks to the host (`kv_offload.py`), and back when it continues. It is
  not recomputed, so its interventions read and edit each token once.

The workers zero the KV blocks that a traced request leaves, before another request writes to them (`kv_offload.py` says
why).

A paused request is not scheduled. It takes neither tokens of a step nor a place among the running requests. It stays in
vLLM's own queues, where an abort or the token of a running step can find it. It is taken out of them only while vLLM
plans a step or counts the requests with work to do. It keeps its KV blocks until another request needs one and none is
free; then paused requests are preempted first.

vLLM sees an engine with nothing but paused requests as idle, and waits for messages. Before that, the scheduler makes
one step without tokens, so that the workers report the last step that had tokens.

With speculative decoding, not all traced requests are drafted (`drafts.py`).

With each step the scheduler tells the workers how many tokens each traced request has that ended since the last step.
The request may have been in later steps too. An abort, and with async scheduling any end, comes while the next step is
already running.

EngineCore builds the scheduler from a dotted path, [`pausing_scheduler`][]. From then on EngineCore answers these
utility calls: `tracewire_pause`, `tracewire_resume`, `tracewire_hold` (pauses all requests, later ones included),
`tracewire_end` (aborts requests, and returns how many tokens each has) and `tracewire_counts`. A step that was given to
the workers is not called back. So a pause takes effect after at most one more step, or two with async scheduling.
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

from tracewire_engine.protocol.drafting import draft_slots
from tracewire_engine.protocol.keys import KEPT_BYTES, STEP_TOKENS

from .drafts import Drafting, is_plain, step_tokens

__all__ = ["PausingAsyncScheduler", "PausingScheduler", "pausing_scheduler"]

#: How many bytes of KV cache of preempted requests a worker keeps, by default.
_KEPT_BYTES = 8 << 30

#: vLLM puts a full KV block into the prefix cache at an allocation when the block's last token is known. That is up to
#: this many steps after the step that computes the token was planned. (If more steps are running, vLLM does so when it
#: handles the token's output.)
_LATE = 2

#: The attributes with vLLM's queues of requests that do not run. Each version of vLLM has two of them.
_WAITING = ("waiting", "kv_holding_waiting", "skipped_waiting")


#: A context that changes nothing, for most steps.
_AS_IT_IS = nullcontext()


class _Pausing(Drafting):
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
        #: The adapters that have all requests paused, later ones included.
        self.tracewire_held: frozenset[int] = frozenset()
        #: Running requests that are hidden from vLLM at the moment. If KV blocks run out, they are preempted, the last
        #: first.
        self.tracewire_aside: list[Any] = []
        self.tracewire_preempted: list[Any] = []
        extra = self.vllm_config.additional_config
        if self.scheduler_config.enable_chunked_prefill:
            self.max_num_scheduled_tokens = min(
                self.max_num_scheduled_tokens, extra.get(STEP_TOKENS, self.max_num_scheduled_tokens)
            )
        #: Whether the last step had tokens.
        self.tracewire_stepped = False
        #: A traced request whose prompt did not fit into the last step.
        self.tracewire_unfit: Any = None
        #: The KV blocks that the workers must copy to the host before the next step, by request id: a list of block ids
        #: for each KV cache group, 0 for no block. And how many blocks the workers hold of each preempted request.
        self.tracewire_leaving: dict[str, list[list[int]]] = {}
        self.tracewire_kept: dict[Any, int] = {}
        self.tracewire_preemptions = self.tracewire_steps = 0
        #: How many tokens each traced request has that ended since the last step.
        self.tracewire_ends: dict[str, int] = {}
        #: What vLLM's drafting model takes of a step's capacity for each request.
        self._slots = draft_slots(self.vllm_config)
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        self._allocate = manager.allocate_slots
        # vLLM calls this for running and for waiting requests, so this is where a lack of free blocks shows.
        manager.allocate_slots = self._allocate_slots
        #: The ids of KV blocks that traced requests have; and of those that they left and the workers must still zero.
        self.tracewire_edited: set[int] = set()
        self.tracewire_unclean: list[int] = []
        self._for_traced = False
        pool: Any = manager.block_pool
        self._take_from_pool, self._give_to_pool = pool.get_new_blocks, pool.free_blocks
        pool.get_new_blocks, pool.free_blocks = self._taken_blocks, self._given_blocks
        coordinator: Any = manager.coordinator
        #: For a simple KV cache (`_is_simple`), how many positions a block holds, else 1; how many full blocks of each
        #: request are in the prefix cache; and the result of an allocation without new blocks.
        self._block_size, self._cached = 1, None
        self._nothing: Any = manager.empty_kv_cache_blocks
        if not self.tracewire_drafting and _is_simple(manager):
            (simple,) = coordinator.single_type_managers
            self._block_size, self._cached = simple.block_size, simple.num_cached_block
        self._cache = coordinator.cache_blocks
        # vLLM puts all blocks into the prefix cache through this function.
        coordinator.cache_blocks = self._cache_blocks
        groups: Any = self.kv_cache_config.kv_cache_groups  # type: ignore[attr-defined]
        self._keepable = int(extra.get(KEPT_BYTES, _KEPT_BYTES) / _block_bytes(groups)) if _can_keep(groups) else 0

    def pause_requests(self, request_ids: Iterable[str]) -> int:
        """Leave these requests out of every step until they are resumed. Returns how many of them have not ended."""
        found = {self.requests[request_id] for request_id in request_ids if request_id in self.requests}
        alive = {request for request in found if not request.is_finished()}
        self.tracewire_paused |= alive
        return len(alive)

    def resume_requests(self, request_ids: Iterable[str]) -> int:
        """Resume these requests. Returns how many of them were paused."""
        names = set(request_ids)
        found = {request for request in self.tracewire_paused if request.request_id in names}
        found = {request for request in found if not request.is_finished()}
        self.tracewire_paused -= found
        return len(found)

    def hold(self, on: bool, adapter: int = 0) -> None:
        """With `on`, an adapter has all requests left out of every step, until it calls without.

        Requests that are paused singly are left out in any case.
        """
        self.tracewire_held = self.tracewire_held | {adapter} if on else self.tracewire_held - {adapter}

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Let vLLM plan the next step without paused requests, and add the messages for the workers to it."""
        with self._set_aside(), self._make_room():
            output: Any = super().schedule(*args, **options)
        self.tracewire_stepped = output.total_num_scheduled_tokens > 0
        self.tracewire_steps += self.tracewire_stepped
        # The workers read these before they write to any KV block.
        output.tracewire_leaving, self.tracewire_leaving = self.tracewire_leaving, {}
        output.tracewire_ends, self.tracewire_ends = self.tracewire_ends, {}
        output.tracewire_unclean, self.tracewire_unclean = self.tracewire_unclean, []
        return output

    def tokens(self, request_ids: Iterable[str]) -> dict[str, int]:
        """How many tokens each of these requests has generated. Requests that have ended are left out."""
        found = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        return {request.request_id: request.num_output_tokens for request in found if not request.is_finished()}

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        if not is_plain(request):
            self.tracewire_ends[request.request_id] = request.num_output_tokens
        return super()._free_request(request, *args, **options)  # type: ignore[misc]

    def counts(self) -> dict[str, int]:
        """Numbers of requests, preemptions, steps and KV blocks, for tests and for finding leaks."""
        pool: Any = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        return {
            "requests": len(self.requests),
            "paused": len(self._still_paused()),
            "kept": len(self._still_kept()),
            "preemptions": self.tracewire_preemptions,
            "steps": self.tracewire_steps,
            "drafted": self.tracewire_drafted,
            "taken": self.tracewire_taken,
            # vLLM keeps block 0 to stand for no block.
            "blocks": pool.num_gpu_blocks - 1,
            "free_blocks": pool.get_num_free_blocks(),
        }

    def get_num_unfinished_requests(self) -> int:
        """How many requests have work to do: those that are not paused."""
        with self._set_aside():
            count: int = super().get_num_unfinished_requests()  # type: ignore[misc]
        return count

    def has_requests(self) -> bool:
        """Whether EngineCore must make a step."""
        return bool(super().has_requests()) or (self.tracewire_stepped and bool(self._still_paused()))  # type: ignore[misc]

    def _still_paused(self) -> set[Any]:
        if any(request.is_finished() for request in self.tracewire_paused):
            self.tracewire_paused = {request for request in self.tracewire_paused if not request.is_finished()}
        if self.tracewire_held:
            return {request for request in self.requests.values() if not request.is_finished()}
        return self.tracewire_paused

    def _set_aside(self) -> AbstractContextManager[None]:
        """A context in which vLLM sees no paused requests, and no more running requests than may run at once.

        There can be more, because another request may have taken the place of a paused one that was then resumed. The
        extra requests wait for a place and keep their KV blocks.
        """
        paused, limit = self._still_paused(), self._places()
        if self.lora_config is not None:
            paused = paused | self._beyond_loras(paused)
        return self._without(paused, limit) if paused or len(self.running) > limit else _AS_IT_IS

    def _beyond_loras(self, paused: set[Any]) -> set[Any]:
        """The running requests whose LoRA adapters are too many for one step. Earlier requests take precedence.

        There can be too many, because another adapter may have taken the place of a paused request's adapter.
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
            # Running requests go behind those that ran meanwhile, waiting ones before the others that wait.
            self.running.extend(aside)
            for queue, out in taken:
                queue.prepend_requests(reversed(out))
            self.waiting.prepend_requests(self.tracewire_preempted)
            self.tracewire_aside, self.tracewire_preempted = [], []

    def _places(self) -> int:
        """How many requests may run at once."""
        return getattr(self, "max_num_active_reqs", None) or self.max_num_running_reqs

    def _make_room(self) -> AbstractContextManager[None]:
        """A context in which the step has room for the traced prompt that did not fit into the last one, if any.

        Prompts that are being computed in chunks rest for the step. If the generating requests leave too few tokens,
        they rest too.
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
        beside = sum(map(step_tokens, going))
        if needed + beside + self._slots * (1 + len(going)) > config.max_num_batched_tokens:
            going, beside = [], 0
        self.running = list(going)
        places = "max_num_active_reqs" if hasattr(self, "max_num_active_reqs") else "max_num_running_reqs"
        limit = getattr(self, places)
        setattr(self, places, limit - (len(before) - len(going)))
        self.max_num_scheduled_tokens = max(usual, needed + beside)
        config.long_prefill_token_threshold = 0
        try:
            yield
        finally:
            self.max_num_scheduled_tokens, config.long_prefill_token_threshold = usual, threshold
            setattr(self, places, limit)
            # Restore the order, without requests that were preempted; new requests come last.
            gone = set(going) - set(self.running)
            fresh = [one for one in self.running if one not in going]
            self.running = [one for one in before if one not in gone] + fresh

    def _victim(self) -> Any:
        """Take the request to preempt out of those set aside: the last plain one, or else the last."""
        aside = self.tracewire_aside
        return aside.pop(next((place for place in range(len(aside) - 1, -1, -1) if is_plain(aside[place])), -1))

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        """Replaces vLLM's allocation of KV blocks for a request. It can also take the blocks of requests set aside.

        A traced prompt gets blocks for the whole prompt, or none yet. If the next token of a generating request fits
        into a block that it has, vLLM is not asked at all.
        """
        # Called for each request in each step, so the common case comes out early.
        if request.status is not RequestStatus.RUNNING:
            if not is_plain(request) and self._is_cut(request, num_new_tokens, *args, **options):
                self.tracewire_unfit = request
                return None
            if request in self.tracewire_kept and request.num_computed_tokens:
                return self._allocate_kept(request, num_new_tokens, *args, **options)
        elif num_new_tokens == 1 and (request.num_computed_tokens + 1) % self._block_size > _LATE:
            return self._nothing
        return self._allocate_or_take(request, num_new_tokens, *args, **options)

    def _allocate_kept(self, request: Any, *args: Any, **options: Any) -> Any:
        """Allocate KV blocks for a preempted request whose KV the workers hold.

        vLLM is told that the KV of its computed tokens comes from outside, as from a KV connector.
        """
        options["num_external_computed_tokens"] = computed = request.num_computed_tokens
        request.num_computed_tokens = 0
        try:
            return self._allocate_or_take(request, *args, **options)
        finally:
            request.num_computed_tokens = computed

    def _is_cut(self, request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, **options: Any) -> bool:
        """Whether vLLM would cut the prompt of a request that is about to run, and compute only a part of it."""
        computed = (
            request.num_computed_tokens + num_new_computed_tokens + options.get("num_external_computed_tokens", 0)
        )
        left: int = request.num_tokens - computed
        most: int = self.scheduler_config.max_num_batched_tokens - self._slots
        # A prompt that fits into no step is cut all the same, so that it does not block the queue for ever.
        return num_new_tokens < left <= most

    def _allocate_or_take(self, request: Any, *args: Any, **options: Any) -> Any:
        """Allocate KV blocks as vLLM does. While none are free, preempt requests that are set aside."""
        blocks = self._allocate_for(request, *args, **options)
        while blocks is None and self.tracewire_aside:
            victim = self._victim()
            self._preempt_request(victim, time.monotonic())
            # It must not be scheduled again in this very step.
            self.waiting.remove_request(victim)
            self.tracewire_preempted.append(victim)
            blocks = self._allocate_for(request, *args, **options)
        return blocks

    def _allocate_for(self, request: Any, *args: Any, **options: Any) -> Any:
        """Allocate KV blocks as vLLM does, and note those of a traced request."""
        self._for_traced = not is_plain(request)
        try:
            return self._allocate(request, *args, **options)
        finally:
            self._for_traced = False

    def _taken_blocks(self, *args: Any, **options: Any) -> list[Any]:
        """Replaces the block pool's allocation, which serves all requests, to note the blocks of traced ones."""
        blocks: list[Any] = self._take_from_pool(*args, **options)
        if self._for_traced:
            self.tracewire_edited.update([block.block_id for block in blocks])
        return blocks

    def _given_blocks(self, blocks: Iterable[Any], *args: Any, **options: Any) -> None:
        """Replaces the block pool's release of blocks, to find those of traced requests that must be zeroed.

        vLLM calls it at a request's end, when a request is preempted, and for blocks behind a sliding window.
        """
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
        """Replaces vLLM's function that puts blocks into the prefix cache: it does so for plain requests only."""
        cached = self._cached
        if cached is not None and num_computed_tokens // self._block_size <= cached.get(request.request_id, 0):
            return
        if is_plain(request):
            self._cache(request, num_computed_tokens)

    def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
        """Preempt a request as vLLM does. Of a traced request, let the workers keep the KV that it has computed."""
        computed = request.num_computed_tokens
        held: list[list[int]] = []
        # vLLM 0.25 resumes a preempted request even if tokens of it are still being computed. At most one may be: it is
        # known by then.
        settled = hasattr(request, "num_stale_output_tokens") or request.num_output_placeholders <= 1
        # vLLM sets `drop_stale_output` if the KV is no longer valid.
        if not is_plain(request) and computed and settled and not options.get("drop_stale_output", False):
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
        """The ids of the KV blocks with a request's first `computed` tokens, by KV cache group.

        The id is 0 where a sliding window has moved past the block.
        """
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        sizes = [one.block_size for one in manager.coordinator.single_type_managers]
        pairs = zip(manager.get_block_ids(request_id), sizes, strict=True)
        return [list(blocks[: -(-computed // size)]) for blocks, size in pairs]

    def _still_kept(self) -> dict[Any, int]:
        """How many KV blocks the workers hold of each preempted request."""
        kept = self.tracewire_kept
        for request in [one for one in kept if one.is_finished() or one.status != RequestStatus.PREEMPTED]:
            del kept[request]
        return kept


def _is_simple(manager: Any) -> bool:
    """Whether a KV cache has one kind of block, of full attention, so that a request keeps its blocks to its end."""
    managers = manager.coordinator.single_type_managers
    return (
        len(managers) == 1
        and type(managers[0]) is FullAttentionManager
        and managers[0].block_pool.hash_block_size == managers[0].block_size
    )


def _specs(group: Any) -> list[Any]:
    """The KV cache specification of each layer of a KV cache group."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [group.kv_cache_spec] * len(group.layer_names)


def _can_keep(groups: Any) -> bool:
    """Whether copying a request's KV blocks saves all that it has computed.

    This holds for attention layers. It holds for recurrent layers, whose state lies in one block, unless vLLM caches
    their states for other requests.
    """
    return bool(groups) and all(
        isinstance(spec, AttentionSpec)
        or (isinstance(spec, MambaSpec) and getattr(spec, "mamba_cache_mode", "none") == "none")
        for group in groups
        for spec in _specs(group)
    )


def _block_bytes(groups: Any) -> int:
    """How many bytes a KV block takes in all layers of a worker."""
    size: int = max(sum(spec.page_size_bytes for spec in _specs(group)) for group in groups)
    return size


def _tokens_left(request: Any) -> int:
    """How many tokens of a running request are still to be computed: 1 if it generates."""
    left: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return left


class PausingScheduler(_Pausing, Scheduler):
    """vLLM's synchronous scheduler, which knows each step's tokens before it plans the next step, with pauses."""


class PausingAsyncScheduler(_Pausing, AsyncScheduler):
    """vLLM's asynchronous scheduler, which plans a step while the one before runs, with pauses."""


def _pause(core: Any, request_ids: list[str]) -> int:
    count: int = core.scheduler.pause_requests(request_ids)
    return count


def _resume(core: Any, request_ids: list[str]) -> int:
    count: int = core.scheduler.resume_requests(request_ids)
    return count


def _hold(core: Any, on: bool, adapter: int) -> None:
    core.scheduler.hold(on, adapter)


def _end(core: Any, request_ids: list[str]) -> dict[str, int]:
    tokens: dict[str, int] = core.scheduler.tokens(request_ids)
    core.abort_requests(request_ids)
    return tokens


def _counts(core: Any) -> dict[str, int]:
    counts: dict[str, int] = core.scheduler.counts()
    return counts


def pausing_scheduler(vllm_config: Any, **options: Any) -> _Pausing:
    """Make EngineCore's scheduler, and add the utility calls to EngineCore. vLLM's option `scheduler_cls` names this.

    Args:
        vllm_config: of the engine; decides between the synchronous and the asynchronous scheduler.
        options: the other arguments that vLLM gives a scheduler.
    """
    EngineCore.tracewire_pause, EngineCore.tracewire_resume, EngineCore.tracewire_hold = _pause, _resume, _hold
    EngineCore.tracewire_counts, EngineCore.tracewire_end = _counts, _end
    kind = PausingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PausingScheduler
    return kind(vllm_config=vllm_config, **options)
