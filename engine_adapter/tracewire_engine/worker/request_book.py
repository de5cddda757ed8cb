"""The live requests that have blocks, and which rows of a step belong to which block.

vLLM packs the tokens of all requests of a step into one batch. Before a step's forward pass the book gives each block
the span of its request's tokens, and behind the pass its request's row: logits and samples have one row a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from greenlet import error as GreenletError
from nnsight.intervention.interleaver import dangling_unwind

from tracewire_bus.wire.messages import Failure

from .blocks.mediator import BlockMediator
from .blocks.request import Request

__all__ = ["RequestBook", "end_waiting", "token_index"]


class RequestBook:
    """The live requests that have blocks, by the scheduler's id."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        #: The waiting blocks whose request is not in the current step, and how often the model had passed each
        #: location when that step began.
        self.out: set[BlockMediator] = set()
        self.counts: dict[str, int] = {}
        #: How many requests the current step has.
        self.rows = 0

    def workers(self) -> list[BlockMediator]:
        """The mediators of all live requests."""
        return [mediator for request in self.requests.values() for mediator in request.workers()]

    def refuse_cut(self, scheduled: Mapping[str, int], states: Mapping[str, Any]) -> None:
        """End the blocks of requests of whose prompt this step computes a part only, because it fits into no step.

        Args:
            scheduled: how many tokens the step has of each request.
            states: vLLM's state of each request, with `num_computed_tokens` and `num_prompt_tokens`.
        """
        for request_id, request in self.requests.items():
            tokens = scheduled.get(request_id)
            if tokens is None or request.mediator is None:
                continue
            state = states[request_id]
            if state.num_computed_tokens + tokens >= state.num_prompt_tokens:
                continue
            request.mediator, request.copies = None, {}
            request.error = Failure(
                type="RuntimeError",
                message=f"a step of this engine takes {tokens} tokens of the prompt's {state.num_prompt_tokens}, and a "
                "block must see its prompt whole; raise --max-num-batched-tokens",
                field="block",
            )

    def scope(self, model: Any, spans: Sequence[tuple[str, int]]) -> None:
        """Begin a step: start the blocks of requests that are new in it, and give each block its request's tokens.

        Args:
            model: nnsight's, whose interleaver serves the blocks.
            spans: the step's requests in the order of the batch, each with its number of tokens.
        """
        interleaver = model.interleaver
        workers = self.workers()
        for mediator in workers:
            mediator.batch_group = None
        serving: list[BlockMediator] = []
        start = 0
        for row, (request_id, tokens) in enumerate(spans):
            request = self.requests.get(request_id)
            for mediator in () if request is None else request.workers():
                ran_out = mediator.worker is not None and not mediator.alive and mediator.exception is None
                if ran_out and not mediator.caches:
                    continue
                mediator.batch_group, mediator.row = [start, tokens], row
                serving.append(mediator)
                if mediator.worker is None:
                    _start(mediator, interleaver)
            start += tokens
        self.exclude_missed_steps(model)
        self.out = {one for one in workers if one.worker is not None and one.batch_group is None and one.alive}
        if self.out:
            self.counts = dict(interleaver.counts)
        interleaver.batcher.total, self.rows = start, len(spans)
        interleaver.mediators = serving
        interleaver.reindex()

    def exclude_missed_steps(self, model: Any) -> None:
        """Exclude locations passed in steps without a block's request from the block's counts."""
        for mediator in self.out:
            start = mediator.counts_at_start
            for location, count in model.interleaver.counts.items():
                passed = count - self.counts.get(location, 0)
                if passed:
                    start[location] = start.get(location, 0) + passed
        self.out = set()

    def unflatten(self, model: Any) -> None:
        """End a step's forward pass: give each block its request's row in place of its request's tokens."""
        for mediator in model.interleaver.mediators:
            mediator.batch_group = [mediator.row, 1]
        model.interleaver.batcher.total = self.rows

    def record_saves(self) -> None:
        """End a step: note the saves of each block that was in it."""
        for mediator in self.workers():
            if mediator.batch_group is not None:
                self.record(mediator)

    def record(self, mediator: BlockMediator) -> None:
        """Note a block's saves. The reporter reads errors from the mediator later."""
        mediator.found = mediator.saved()


def _start(mediator: BlockMediator, interleaver: Any) -> None:
    """Run a block up to the first location that it asks for. An error before that ends the block."""
    try:
        mediator.start(interleaver)
    except Exception as exception:
        mediator.exception = exception


def end_waiting(mediator: BlockMediator) -> None:
    """End a block that still waits for a location although its request is over.

    A loop over steps ends in this way as a rule. For a location that the model had passed before, it is an error.
    """
    if not mediator.alive or mediator.pending is None:
        return
    error, usual = dangling_unwind(mediator)
    try:
        mediator.worker.throw(error)
    except GreenletError:
        return
    except BaseException as thrown:
        mediator.waited_in_vain = usual is None or thrown is not error


def token_index(state: Any, tokens: int) -> int:
    """The index of the token that a request samples in a step with so many of its tokens.

    Negative while the prompt is only partly computed.

    Args:
        state: vLLM's of the request, with `num_computed_tokens` and `num_prompt_tokens`.
        tokens: how many of its tokens the step has.
    """
    index: int = state.num_computed_tokens + tokens - state.num_prompt_tokens
    return index
