"""Checks vLLM's options of speculative decoding (`--speculative-config`).

vLLM has more ways of drafting than Tracewire has been tried with. A setting that has not been tried is refused before
anything is started, and the error says what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["METHODS", "speculation_problem"]

#: The methods that have been tried (`tests/e2e/speculation`).
METHODS = ("ngram",)

#: Settings that have not been tried, each with the reason.
_UNTRIED = {
    "parallel_drafting": "a step would have places for tokens of no request",
    "enable_adaptive_verification": "vLLM would decide on the device how many rows each request has in a step",
    "num_speculative_tokens_per_batch_size": "the number of drafted tokens would change from step to step",
}


def speculation_problem(arguments: Any, taps: Sequence[str] = (), *, second: bool = False) -> str:
    """What is wrong with the speculative decoding that vLLM's engine arguments ask for; `""` if nothing is.

    Args:
        arguments: vLLM's.
        taps: patterns of the locations that CUDA graphs serve.
        second: whether vLLM uses its second model runner.
    """
    config = getattr(arguments, "speculative_config", None)
    if not config:
        return ""
    if not isinstance(config, dict):
        return f"expected a JSON object, got {type(config).__name__}"
    method, tokens = config.get("method"), config.get("num_speculative_tokens")
    if method not in METHODS:
        said = "is missing" if method is None else f"is {method!r}"
        return f"method {said}; expected {' or '.join(METHODS)}"
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        said = "is missing" if tokens is None else f"is {tokens!r}"
        return f"num_speculative_tokens {said}; expected a number of at least 1"
    for name, reason in _UNTRIED.items():
        if config.get(name):
            return f"{name} is not supported: {reason}"
    if (getattr(arguments, "pipeline_parallel_size", 1) or 1) > 1:
        return "it has not been tried with --pipeline-parallel-size; expected one stage"
    if second:
        return "it has not been tried with --model-runner second; expected the first one"
    if taps:
        return "it has not been tried with --tap, in CUDA graphs; expected no taps"
    return ""
