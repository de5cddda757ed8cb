"""Checks vLLM's options of speculative decoding: `--speculative-config`, and those for single settings.

vLLM has more ways of drafting than Tracewire has been tried with. A setting that has not been tried is refused before
anything is started, and the error says what is expected.
"""

from __future__ import annotations

from typing import Any

__all__ = ["METHODS", "needs_first_runner", "speculation_problem", "speculation_settings"]

#: The methods that have been tried (`tests/e2e/speculation`), by whether vLLM uses its second model runner.
METHODS = {
    False: ("ngram", "draft_model", "eagle", "eagle3", "medusa", "custom_class"),
    True: ("ngram", "draft_model", "eagle", "eagle3"),
}

#: What `model` is for the methods that need one.
_MODELS = {
    **dict.fromkeys(("draft_model", "eagle", "eagle3", "medusa"), "the name or the folder of a model that drafts"),
    "custom_class": "the path of a class that drafts, such as package.module.Class",
}

#: Settings that have not been tried, each with the reason.
_UNTRIED = {
    "parallel_drafting": "a step would have places for tokens of no request",
    "enable_adaptive_verification": "vLLM would decide on the device how many rows each request has in a step",
    "num_speculative_tokens_per_batch_size": "the number of drafted tokens would change from step to step",
}

#: vLLM's options for single settings.
_OPTIONS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}


def speculation_settings(arguments: Any) -> Any:
    """The settings of speculative decoding that vLLM's engine arguments have, of all their options; `None` if none."""
    config = getattr(arguments, "speculative_config", None)
    single = {name: getattr(arguments, option, None) for name, option in _OPTIONS.items()}
    single = {name: value for name, value in single.items() if value is not None}
    if isinstance(config, dict):
        config = {name.replace("-", "_"): value for name, value in config.items()}
    return {**single, **config} if isinstance(config, dict) else config or single or None


def needs_first_runner(arguments: Any) -> bool:
    """Whether vLLM's engine arguments ask for a method of drafting that has not been tried on the second runner."""
    config = speculation_settings(arguments)
    return isinstance(config, dict) and bool(config) and config.get("method") not in METHODS[True]


def speculation_problem(arguments: Any, *, second: bool = False) -> str:
    """What is wrong with the speculative decoding that vLLM's engine arguments ask for; `""` if nothing is.

    Args:
        arguments: vLLM's.
        second: whether vLLM uses its second model runner.
    """
    config = speculation_settings(arguments)
    if not config:
        return ""
    if not isinstance(config, dict):
        return f"expected a JSON object, got {type(config).__name__}"
    if problem := _method_problem(config, second=second):
        return problem
    tokens = config.get("num_speculative_tokens")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        said = "is missing" if tokens is None else f"is {tokens!r}"
        return f"num_speculative_tokens {said}; expected a number of at least 1"
    for name, reason in _UNTRIED.items():
        if config.get(name):
            return f"{name} is not supported: {reason}"
    if (getattr(arguments, "pipeline_parallel_size", 1) or 1) > 1:
        return "it has not been tried with --pipeline-parallel-size; expected one stage"
    return ""


def _method_problem(config: dict[str, Any], *, second: bool) -> str:
    """What is wrong with the method, or with the model that it needs."""
    method, model = config.get("method"), config.get("model")
    if method not in METHODS[second]:
        said = "is missing" if method is None else f"is {method!r}"
        *most, last = METHODS[second]
        runner = "second" if second else "first"
        return f"method {said}; expected {', '.join(most)} or {last} with --model-runner {runner}"
    if method in _MODELS and (not isinstance(model, str) or not model):
        said = "is missing" if model is None else f"is {model!r}"
        return f"model {said}; expected {_MODELS[method]} ({method})"
    return ""
