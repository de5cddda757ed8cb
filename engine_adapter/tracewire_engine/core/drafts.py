"""Speculative decoding in vLLM's schedulers: which requests are drafted, and which get one token a step.

With `--speculative-config` vLLM proposes tokens for each request, the drafts, and a step computes them beside the
request's next token. Plain requests are drafted. So are traced ones of which the adapter says so (`DRAFTS_ARG`): their
declared interventions act on each row by itself. Any other traced request gets one token a step all the same, so that a
step of it is a token of it. So its drafts are dropped when they come:

- vLLM's synchronous scheduler is given the drafts behind a step (`update_draft_token_ids`).
- The asynchronous one plans the next step before the drafts exist. It puts placeholders into the request, and the
  workers put the drafts in their place (`_update_after_schedule`).
- A waiting request that needs one token is padded with placeholders, so that vLLM can replay a CUDA graph for the
  step. Such a request can be traced: a preempted one whose KV was kept, or one whose prompt has one token. No request
  is padded in a step for which one waits.

A drafted request whose submission gives its first tokens (`forced_tokens`) is drafted behind these tokens.

The workers have the drafts of the last step only. So a request that was left out of it, since it was paused, comes back
without placeholders.

The asynchronous scheduler counts drafts as taken until it knows better. A traced request that is preempted meanwhile
goes on behind the tokens that it turned out to have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, DRAFTS_ARG, EDITS_ARG, FORCED_ARG

__all__ = ["Drafting", "is_plain", "step_tokens"]


def is_plain(request: Any) -> bool:
    """Whether a request of vLLM's scheduler has neither a block nor interventions."""
    plain: bool | None = getattr(request, "tracewire_plain", None)
    if plain is None:
        # Cached on the request, since each step asks this of each request.
        plain = request.tracewire_plain = _arguments(request).keys().isdisjoint((BLOCK_ARG, DECLARED_ARG, EDITS_ARG))
    return plain


def _arguments(request: Any) -> dict[str, Any]:
    return getattr(request.sampling_params, "extra_args", None) or {}


def step_tokens(request: Any) -> int:
    """How many tokens a generating request has in its next step: one, and its drafts."""
    return 1 + len(request.spec_token_ids)


class _Unpadded:
    """Stands for vLLM's table of how many tokens to draft by the number of requests, with which nothing is padded."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __getitem__(self, requests: int) -> int:
        return self._tokens


class Drafting:
    """The additions to either of vLLM's schedulers. Without `--speculative-config` they change nothing."""

    requests: dict[str, Any]
    vllm_config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Whether vLLM drafts tokens; and whether the workers put them in the place of placeholders.
        self.tracewire_drafting = self.vllm_config.speculative_config is not None
        self.tracewire_placeholders = self.tracewire_drafting and hasattr(self, "_spec_token_placeholders")
        #: How many tokens have been drafted, and how many of them were taken.
        self.tracewire_drafted = self.tracewire_taken = 0
        #: With placeholders, the requests of the last step.
        self.tracewire_stepping: frozenset[str] = frozenset()
        #: Traced requests whose prompts have one token, and that have not run yet.
        self.tracewire_short: set[Any] = set()

    def may_draft(self, request: Any) -> bool:
        """Whether the tokens of this request's next step are drafted."""
        if not is_plain(request) and DRAFTS_ARG not in _arguments(request):
            return False
        forced: int | None = getattr(request, "tracewire_forced", None)
        if forced is None:
            forced = request.tracewire_forced = len(_arguments(request).get(FORCED_ARG) or ())
        return not forced or request.num_output_tokens + request.num_output_placeholders >= forced

    def drop_drafts(self, request_ids: Iterable[str]) -> None:
        """Drop the drafts, or the placeholders, of those of these requests that are not drafted."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and request.spec_token_ids and not self.may_draft(request):
                # Another list, since vLLM's requests share that of placeholders.
                request.spec_token_ids = []

    def add_request(self, request: Any, *args: Any, **options: Any) -> None:
        super().add_request(request, *args, **options)  # type: ignore[misc]
        if self.tracewire_drafting and request.num_tokens == 1 and not is_plain(request):
            self.tracewire_short.add(request)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Let vLLM plan the next step, without padding if that could reach a traced request."""
        if self.tracewire_placeholders:
            self._forget_ahead()
        if not self.tracewire_drafting or not self._may_pad_wrongly():
            return super().schedule(*args, **options)  # type: ignore[misc]
        scheduler: Any = self
        table, scheduler.dynamic_sd_lookup = scheduler.dynamic_sd_lookup, _Unpadded(scheduler.num_spec_tokens)
        try:
            return super().schedule(*args, **options)  # type: ignore[misc]
        finally:
            scheduler.dynamic_sd_lookup = table

    def _forget_ahead(self) -> None:
        """Forget what was planned ahead: drafts that the workers no longer have, and drafts that were not taken."""
        scheduler: Any = self
        for request in scheduler.running:
            if request.spec_token_ids and request.request_id not in self.tracewire_stepping:
                request.spec_token_ids = []
        for request in scheduler._still_kept():
            if not getattr(request, "num_stale_output_tokens", 0):
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)

    def _may_pad_wrongly(self) -> bool:
        """Whether a traced request may begin to run in the next step with one token."""
        scheduler: Any = self
        if getattr(scheduler, "dynamic_sd_lookup", None) is not None:
            return False
        if self.tracewire_short:
            waiting = (one for one in self.tracewire_short if not one.is_finished() and not one.num_computed_tokens)
            self.tracewire_short = set(waiting)
        return bool(self.tracewire_short or scheduler.tracewire_kept)

    def update_draft_token_ids(self, drafts: Any) -> None:
        super().update_draft_token_ids(drafts)  # type: ignore[misc]
        self.drop_drafts(drafts.req_ids)

    def _update_after_schedule(self, output: Any) -> None:
        super()._update_after_schedule(output)  # type: ignore[misc]
        if self.tracewire_placeholders:
            self.tracewire_stepping = frozenset(output.num_scheduled_tokens)
            self.drop_drafts(output.num_scheduled_tokens)

    def make_spec_decoding_stats(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **rest: Any) -> Any:
        """Count drafts. vLLM calls this for each drafted request of a step that is over."""
        self.tracewire_drafted += num_draft_tokens
        self.tracewire_taken += num_accepted_tokens
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **rest
        )
