"""Attributes of OpenTelemetry spans about a trace, by the semantic conventions for generative AI.

Clients and engines give their spans the same attributes. Nothing here imports OpenTelemetry. No attribute has a prompt,
an output or a saved value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tracewire_bus.wire.messages import Failure, Submission
from tracewire_bus.wire.messages import Final as FinalEvent

__all__ = [
    "MESSAGE_CHARACTERS",
    "end_attributes",
    "failed",
    "request_attributes",
    "sampling_attributes",
    "span_name",
    "w3c_context",
]

#: Characters of an error's message that a span keeps.
MESSAGE_CHARACTERS: Final = 300

#: The fields of W3C's trace context, and the characters that each may have.
_CONTEXT: Final = {"traceparent": 128, "tracestate": 512}
#: Sampling params with an attribute of their own, by vLLM's names.
_NUMBERS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "temperature": "gen_ai.request.temperature",
    "top_k": "gen_ai.request.top_k",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
#: Ends that are errors. A client that cancels a trace has what the client asked for.
_FAILURES: Final = frozenset({"expired", "failed", "rejected"})

Attributes = dict[str, Any]


def w3c_context(fields: Mapping[str, str]) -> dict[str, str]:
    """The `traceparent` and `tracestate` of a submission's context, without one that is too long."""
    return {name: fields[name] for name, most in _CONTEXT.items() if name in fields and len(fields[name]) <= most}


def _operation(submission: Submission) -> str:
    is_chat = any(invoke.chat is not None or invoke.messages is not None for invoke in submission.invokes)
    return "chat" if is_chat else "text_completion"


def span_name(submission: Submission) -> str:
    """The name of a span about a trace: its operation and its model."""
    return f"{_operation(submission)} {submission.model}"


def request_attributes(submission: Submission) -> Attributes:
    """The attributes of a submission, without its sampling params."""
    return {
        "gen_ai.operation.name": _operation(submission),
        "gen_ai.provider.name": "tracewire",
        "gen_ai.request.model": submission.model,
        "tracewire.trace_id": submission.trace,
        "tracewire.client": submission.client,
        "tracewire.prompts": len(submission.invokes),
    }


def sampling_attributes(sampling: Mapping[str, Any]) -> Attributes:
    """The attributes of a prompt's sampling params. Values of unexpected types have none."""
    found: Attributes = {}
    for name, attribute in _NUMBERS.items():
        value = sampling.get(name)
        # OTLP carries integers of 64 bits, and the engine has not checked a client's params yet.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
            found[attribute] = value
    choices = sampling.get("n")
    if isinstance(choices, int) and 1 < choices < 2**63:
        found["gen_ai.request.choice.count"] = choices
    stop = sampling.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list | tuple) and stops and all(isinstance(one, str) for one in stops):
        found["gen_ai.request.stop_sequences"] = list(stops)
    return found


def end_attributes(final: FinalEvent, finish_reasons: Iterable[str]) -> Attributes:
    """The attributes of a trace's end. `finish_reasons` are those of its choices, in order."""
    usage = final.usage
    found: Attributes = {
        "tracewire.status": final.status,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    if reasons := list(finish_reasons):
        found["gen_ai.response.finish_reasons"] = reasons
    if (failure := failed(final)) is not None:
        found["error.type"] = failure.type
    return found


def failed(final: FinalEvent) -> Failure | None:
    """The error of a final that ends a trace badly; `None` for other ends, and for a trace that a client cancelled."""
    if final.status not in _FAILURES:
        return None
    return final.error or Failure(type=final.status, message="")
