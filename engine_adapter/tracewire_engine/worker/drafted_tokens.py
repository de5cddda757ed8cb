"""How many tokens of drafted requests are computed, as their samples say.

With asynchronous scheduling vLLM plans a step before it knows which drafts of the last one were taken. It counts all of
them as taken, and corrects itself on the device, or later. The worker has sampled the last step when the next one
begins, so it knows. It notes this for requests with declared interventions, whose rows it plans.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .step_states import RequestState

__all__ = ["DraftedTokens"]


class DraftedTokens:
    """What is known of the requests whose last step had drafts."""

    def __init__(self) -> None:
        #: How many tokens of each are computed.
        self._computed: dict[str, int] = {}
        #: Of the step under way: the places of drafted requests in the batch, their names, how many of their tokens are
        #: computed if no draft is taken, and how many drafts they have.
        self._drafted: list[tuple[int, str, int, int]] = []

    @property
    def waiting(self) -> bool:
        """Whether `accept` is to be called for the step under way."""
        return bool(self._drafted)

    def __len__(self) -> int:
        return len(self._computed)

    def computed(self, request: str, told: int) -> int:
        """How many tokens of a request are computed, where vLLM says `told`. It is no less if the request is preempted.

        vLLM computes a preempted request anew from an earlier token on.
        """
        return min(told, self._computed.get(request, told))

    def states(self, order: Iterable[str], told: Mapping[str, Any]) -> dict[str, RequestState]:
        """The states of those of these requests of which vLLM counts too many tokens. `told` are vLLM's states."""
        return {
            name: RequestState(known, told[name].num_prompt_tokens)
            for name in order
            if (known := self._computed.get(name)) is not None and known < told[name].num_computed_tokens
        }

    def generated(self, request: str, prompt: int) -> int | None:
        """How many tokens a request has behind a prompt of so many; `None` if its last step had no drafts."""
        known = self._computed.get(request)
        return None if known is None else known - prompt + 1

    def begin(
        self,
        order: Sequence[str],
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        states: Mapping[str, Any],
        declared: Collection[str],
    ) -> None:
        """Begin a step.

        Args:
            order: the requests of the step, in the order of the batch.
            scheduled: how many tokens each has in it.
            drafts: those of them that are drafts, by request.
            states: how far each was before it.
            declared: the requests that are to be noted.
        """
        if self._computed:
            for name in order:
                self._computed.pop(name, None)
        self._drafted = [
            (place, name, states[name].num_computed_tokens + scheduled[name] - len(drafts[name]), len(drafts[name]))
            for place, name in enumerate(order if drafts else ())
            if name in drafts and name in declared
        ]

    def accept(self, sampled: Sequence[int]) -> None:
        """Note how many tokens each request of the batch has got by the step."""
        for place, name, least, drafts in self._drafted:
            self._computed[name] = least + min(drafts, max(0, sampled[place] - 1))
        self._drafted = []

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that are over."""
        for name in requests:
            self._computed.pop(name, None)
