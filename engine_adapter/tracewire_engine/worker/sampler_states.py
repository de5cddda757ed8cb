"""What the sampler of vLLM's second runner does in each step, although it changes only with the requests.

In every step, vLLM copies the sampling parameters of all requests to where the GPU reads them. They change only when a
request is added. On a small model these copies take a twelfth of the step (vLLM 0.25.1, an H200).

In every step, vLLM also asks which of the batch's requests have penalties, a logit bias, bad words, logprobs and so
on. While the batch has the same requests, the answers stay. Asking takes a thirtieth of the step of a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.sample.sampler import Sampler

__all__ = ["RememberedRows", "changes_with_requests_alone"]

_PACKAGE = "vllm.v1.worker.gpu."

#: vLLM's parts of a sampler that write nothing but what `add_request` has set.
_KNOWN = frozenset(
    {
        "BadWordsState",
        "LogitBiasState",
        "LogprobTokenIdsState",
        "PenaltiesState",
        "RequestState",
        "SamplingStates",
        "ThinkingBudgetState",
        "TraceReplayState",
    }
)


def changes_with_requests_alone(sampler: Any) -> bool:
    """Whether a sampler's `apply_staged_writes` writes nothing new unless `add_request` was called since the last time.

    This is false of a sampler, or a part of one, that vLLM 0.25.1 to 0.32.0 do not have, such as an operator's logits
    processor.
    """
    return type(sampler) is Sampler and all(
        type(part).__module__.startswith(_PACKAGE) and type(part).__name__ in _KNOWN
        for value in vars(sampler).values()
        for part in (value if isinstance(value, list) else [value])
        if hasattr(part, "apply_staged_writes")
    )


class RememberedRows:
    """Has a sampler ask each question about the requests of a batch once, while the batch has the same requests.

    Args:
        sampler: for which `changes_with_requests_alone`. Its answers, and what it samples, stay as they are.
    """

    def __init__(self, sampler: Any) -> None:
        self._rows, self._known = b"", dict[str, Any]()
        states = sampler.sampling_states
        for part, name in (
            (states, "max_num_logprobs"),
            (states, "any_greedy"),
            (states, "any_explicit_seed"),
            (sampler.logprob_token_ids_state, "max_num_token_ids"),
        ):
            if (query := getattr(part, name, None)) is not None:
                setattr(part, name, partial(self._answer, name, query))
        states.get_top_k_top_p = partial(self._top, states, states.get_top_k_top_p)
        self._skip(states, "apply_temperature", lambda rows: _any(~np.isin(states.temperature.np[rows], (0.0, 1.0))))
        self._skip(states, "apply_min_p", lambda rows: _any(states.min_p.np[rows] != 0.0))
        # vLLM 0.29 and later skip these by themselves.
        uses: dict[str, Callable[[Any], Any]] = {
            "logit_bias": lambda part: part.use_logit_bias,
            "penalties": lambda part: part.use_penalty,
            "bad_words": lambda part: part.num_bad_words.np,
        }
        for name, use in uses.items():
            part = getattr(sampler, f"{name}_state", None)
            if hasattr(part, f"apply_{name}"):
                self._skip(part, f"apply_{name}", partial(_is_used, use, part))

    def forget(self) -> None:
        """Forget all answers: a request is added, perhaps at a place that another one had."""
        self._rows, self._known = b"", {}

    def _answer(self, name: str, query: Callable[[Any], Any], rows: Any) -> Any:
        """What `query` says of the places of a batch's requests. `name` is the question's."""
        key = rows.tobytes()
        if key != self._rows:
            self._rows, self._known = key, {}
        known = self._known
        if name not in known:
            known[name] = query(rows)
        return known[name]

    def _top(self, states: Any, query: Callable[..., Any], expanded: Any, rows: Any) -> Any:
        """As vLLM's `get_top_k_top_p`, whose answer for requests that have neither is no tensor."""
        return query(expanded, rows) if self._answer("top", partial(_has_top, states), rows) else (None, None)

    def _skip(self, part: Any, name: str, is_used: Callable[[Any], bool]) -> None:
        """Leave out a method that does nothing unless it `is_used` by a request of the batch."""
        apply = getattr(part, name)

        def apply_if_used(logits: Any, expanded: Any, rows: Any, *more: Any) -> None:
            if self._answer(name, is_used, rows):
                apply(logits, expanded, rows, *more)

        setattr(part, name, apply_if_used)


def _has_top(states: Any, rows: Any) -> bool:
    """Whether a request has a top-k or a top-p."""
    return _any(states.top_k.np[rows] != states.vocab_size) or _any(states.top_p.np[rows] != 1.0)


def _is_used(use: Callable[[Any], Any], part: Any, rows: Any) -> bool:
    return _any(use(part)[rows])


def _any(values: Any) -> bool:
    return bool(np.any(values))
