"""How far the requests of a step are, on a runner that keeps this in arrays and forgets preempted requests.

Most steps ask for the numbers of computed tokens alone, in the order of the batch. So the state of a single request is
made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .request_book import token_index

__all__ = ["RequestState", "StepStates", "computed_tokens", "token_index_of"]


@dataclass(slots=True)
class RequestState:
    """How far a request was at the last step that it was in."""

    num_computed_tokens: int
    num_prompt_tokens: int
    #: How many tokens it has generated, that step's included.
    generated: int = 0


class StepStates(Mapping[str, RequestState]):
    """The states of a step's requests, and of traced requests that are not in the step.

    Args:
        order: the requests of the step, in the order of the batch.
        computed: how many tokens of each were computed before the step.
        prompts: how many tokens of each are its prompt's.
        scheduled: how many tokens of each the step has.
        resting: the other requests.
    """

    def __init__(
        self,
        order: list[str],
        computed: list[int],
        prompts: list[int],
        scheduled: Mapping[str, int],
        resting: Mapping[str, RequestState],
    ) -> None:
        self.order, self.computed = order, computed
        self._prompts, self._scheduled, self._resting = prompts, scheduled, resting

    @cached_property
    def _made(self) -> dict[str, RequestState]:
        rows = zip(self.indices.items(), self.computed, self._prompts, strict=True)
        return {name: RequestState(computed, prompt, max(0, index + 1)) for (name, index), computed, prompt in rows}

    @cached_property
    def indices(self) -> dict[str, int]:
        """The index of the token that each of the step's requests samples in it."""
        counts = map(self._scheduled.__getitem__, self.order)
        rows = zip(self.order, self.computed, counts, self._prompts, strict=True)
        return {name: computed + count - prompt for name, computed, count, prompt in rows}

    def __getitem__(self, request_id: str) -> RequestState:
        found = self._made.get(request_id)
        return self._resting[request_id] if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter({**self._resting, **self._made})

    def __len__(self) -> int:
        return len({**self._resting, **self._made})

    def left(self, order: Iterable[str]) -> dict[str, RequestState]:
        """The states of the step's requests that are not in a later step with these requests."""
        return {} if order == self.order else {name: self._made[name] for name in {*self.order} - {*order}}


def token_index_of(states: Mapping[str, Any], order: list[str], scheduled: Mapping[str, int]) -> Callable[[str], int]:
    """A function that gives the index of the token that a request of a step samples in it (see `token_index`).

    Args:
        states: of the requests for which the function is called, perhaps of no others.
        order: the requests of the step, in the order of the batch.
        scheduled: how many tokens of each the step has.
    """
    if isinstance(states, StepStates) and states.order == order:
        return states.indices.__getitem__
    return lambda name: token_index(states[name], scheduled[name])


def computed_tokens(states: Mapping[str, RequestState], order: list[str]) -> list[int]:
    """How many tokens of each request of a step were computed before the step, in the order of the batch."""
    if isinstance(states, StepStates) and states.order == order:
        return states.computed
    return [states[request_id].num_computed_tokens for request_id in order]
