"""The attributes of spans: by the conventions, whatever a client has sent."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_bus.domain.span_attributes import (
    end_attributes,
    failed,
    request_attributes,
    sampling_attributes,
    span_name,
    w3c_context,
)
from tracewire_bus.wire.messages import Chat, Failure, Final, Invoke, Submission, Usage

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def submission(*invokes: Invoke) -> Submission:
    return Submission(trace="t", model="tiny", invokes=list(invokes) or [Invoke(prompt="x")], client="me")


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, {}),
        (
            {"traceparent": PARENT, "tracestate": "a=b", "baggage": "secret"},
            {"traceparent": PARENT, "tracestate": "a=b"},
        ),
        ({"traceparent": PARENT, "tracestate": "x" * 513}, {"traceparent": PARENT}),
        ({"traceparent": "0" * 129}, {}),
    ],
)
def test_of_a_context_only_w3c_s_fields_count(fields: dict[str, str], kept: dict[str, str]) -> None:
    assert w3c_context(fields) == kept


@pytest.mark.parametrize(
    ("invoke", "operation"),
    [
        (Invoke(prompt="x"), "text_completion"),
        (Invoke(token_ids=[1]), "text_completion"),
        (Invoke(messages=[{"role": "user", "content": "x"}]), "chat"),
        (Invoke(chat=Chat(messages=[])), "chat"),
    ],
)
def test_a_span_is_named_for_its_operation_and_its_model(invoke: Invoke, operation: str) -> None:
    assert span_name(submission(invoke)) == f"{operation} tiny"
    assert request_attributes(submission(invoke)) == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tracewire",
        "gen_ai.request.model": "tiny",
        "tracewire.trace_id": "t",
        "tracewire.client": "me",
        "tracewire.prompts": 1,
    }


@pytest.mark.parametrize(
    ("sampling", "attributes"),
    [
        ({"max_tokens": 8, "temperature": 0.5, "top_p": 1}, {"max_tokens": 8, "temperature": 0.5, "top_p": 1}),
        ({"n": 3, "stop": "END", "seed": 7}, {"choice.count": 3, "stop_sequences": ["END"], "seed": 7}),
        ({"n": 1, "stop": [], "max_tokens": None}, {}),
        ({"stop": ["a", "b"], "unknown": 1}, {"stop_sequences": ["a", "b"]}),
        # The engine has not checked these yet, and OTLP could not carry them.
        ({"seed": 2**63, "max_tokens": "8", "top_k": True, "stop": [1], "n": "2", "temperature": float("nan")}, {}),
    ],
)
def test_sampling_params_have_the_conventions_names(sampling: dict[str, Any], attributes: dict[str, Any]) -> None:
    assert sampling_attributes(sampling) == {f"gen_ai.request.{name}": value for name, value in attributes.items()}


def final(status: Any, error: Failure | None = None) -> Final:
    usage = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
    return Final(attempt=1, seq=4, status=status, error=error, usage=usage)


def test_an_end_has_its_usage_and_its_reasons() -> None:
    assert end_attributes(final("finished"), ["stop", "length"]) == {
        "tracewire.status": "finished",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop", "length"],
    }


@pytest.mark.parametrize("status", ["failed", "rejected", "expired"])
def test_bad_ends_are_errors(status: str) -> None:
    error = Failure(type="ValueError", message="no")
    assert failed(final(status, error)) is error
    assert end_attributes(final(status, error), [])["error.type"] == "ValueError"
    assert end_attributes(final(status), [])["error.type"] == status


@pytest.mark.parametrize("status", ["finished", "stopped", "cancelled"])
def test_other_ends_are_none(status: str) -> None:
    ended = final(status, Failure(type="Cancelled", message="by me"))
    assert failed(ended) is None
    assert "error.type" not in end_attributes(ended, [])
