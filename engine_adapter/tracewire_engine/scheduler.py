"""vLLM's scheduler, which can also pause single requests.

A paused request is not scheduled, and takes neither a step's tokens nor a place among the running requests. It stays in
vLLM's own queues, where an abort, and a token that is still on its way, find it. Only while vLLM decides on a step, or
counts what is left to do, is it set aside from them. Its KV blocks stay its own until somebody finds none free: then
paused requests are preempted first, and computed anew when they are resumed.

An engine that has nothing but paused requests is idle to vLLM, and waits for messages. It makes one step without tokens
before, so that the workers report the last step that had any.

EngineCore builds the scheduler from a dotted path, [`pausing_scheduler`][], and answers the utility calls
`tracewire_pause`, `tracewire_resume` and `tracewire_hold` (which pauses all there are, and all that come) from then on.
A step that has been given to the workers is not called back: a pause takes hold after at most one such step, or two
with async scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from .wiring import BLOCK_ARG, DECLARED_ARG

__all__ = ["PausingAsyncScheduler", "PausingScheduler", "pausing_scheduler"]

#: vLLM's queues of requests that do not run: each version has two of them.
_WAITING = ("waiting", "kv_holding_waiting", "skipped_waiting")


class _Pausing:
    """What is added to either of vLLM's schedulers."""

    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    max_num_running_reqs: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tracewire_paused: set[Any] = set()
        #: Whether all are, those to come included.
        self.tracewire_held = False
        #: What vLLM does not see among the running requests now, and may take blocks from: the last first.
        self.tracewire_aside: list[Any] = []
        self.tracewire_preempted: list[Any] = []
        #: Whether the last step had tokens.
        self.tracewire_stepped = False
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        self._allocate = manager.allocate_slots
        # The one place where running and waiting requests alike learn that there are no free blocks.
        manager.allocate_slots = self._allocate_slots

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
        with self._set_aside():
            output: Any = super().schedule(*args, **options)  # type: ignore[misc]
        self.tracewire_stepped = output.total_num_scheduled_tokens > 0
        return output

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

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Show vLLM its queues without the paused, and no more running requests than it may have.

        There can be more: while a request was paused, its place was another's. It then waits for one, blocks and all.
        """
        paused = self._still_paused()
        limit: int = getattr(self, "max_num_active_reqs", None) or self.max_num_running_reqs
        if not paused and len(self.running) <= limit:
            yield
            return
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

    def _victim(self) -> Any:
        """Who of those set aside is to be computed anew: the last that has no interventions, or else the last.

        A block sees all tokens of such a request in one step, and live parameters have the values that they have then.
        """
        aside = self.tracewire_aside
        return aside.pop(next((place for place in range(len(aside) - 1, -1, -1) if _is_plain(aside[place])), -1))

    def _allocate_slots(self, request: Any, *args: Any, **options: Any) -> Any:
        """vLLM's allocation, which finds the blocks of those set aside when there are no others."""
        blocks = self._allocate(request, *args, **options)
        while blocks is None and self.tracewire_aside:
            victim = self._victim()
            self._preempt_request(victim, time.monotonic())  # type: ignore[attr-defined]
            # Not to be scheduled in this very step.
            self.waiting.remove_request(victim)
            self.tracewire_preempted.append(victim)
            blocks = self._allocate(request, *args, **options)
        return blocks


def _is_plain(request: Any) -> bool:
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    return arguments.keys().isdisjoint((BLOCK_ARG, DECLARED_ARG))


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


def pausing_scheduler(vllm_config: Any, **options: Any) -> _Pausing:
    """Make EngineCore's scheduler, and let EngineCore answer calls about it: what `scheduler_cls` names."""
    EngineCore.tracewire_pause, EngineCore.tracewire_resume, EngineCore.tracewire_hold = _pause, _resume, _hold
    kind = PausingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else PausingScheduler
    return kind(vllm_config=vllm_config, **options)
