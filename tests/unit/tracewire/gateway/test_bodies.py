"""Bodies of requests: what they must have, what they may have, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tracewire.gateway.bodies import (
    ChatBody,
    CompletionBody,
    EditBody,
    EntryBody,
    OpenAIBody,
    SteerBody,
    TraceBody,
)
from tracewire.gateway.responses_bodies import ResponsesBody

MESSAGES = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> CompletionBody:
    """A request for completions."""
    return CompletionBody.model_validate_json(_json({"model": "m", "prompt": "x", **fields}))


def chat(**fields: Any) -> ChatBody:
    """A request for a chat completion."""
    return ChatBody.model_validate_json(_json({"model": "m", "messages": MESSAGES, **fields}))


def _json(body: Any) -> str:
    import json

    return json.dumps(body)


def refused(kind: type[Any], body: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields at fault, and why."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(_json(body))
    return [(".".join(map(str, error["loc"])), error["msg"]) for error in found.value.errors()]


def test_a_small_body_has_the_defaults() -> None:
    body = completion()
    assert (body.choices, body.sampling(), body.prompts(), body.wanted_logprobs()) == (1, {}, ["x"], None)
    # Without the field, saves stay away from the answer.
    assert body.extension.saves == "none"
    assert completion(tracewire={}).extension.saves == "inline"


def test_sampling_params_go_by_vllm_s_names() -> None:
    body = completion(temperature=0, top_k=5, logit_bias={"7": 1.5, "-1": 2}, stop=["a"], seed=0)
    wanted = {"temperature": 0, "top_k": 5, "logit_bias": {7: 1.5, -1: 2}, "stop": ["a"], "seed": 0}
    assert body.sampling() == wanted


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_are_one_or_several(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


def test_logprobs_are_asked_for_in_two_ways() -> None:
    assert completion(logprobs=3).wanted_logprobs() == 3
    assert chat(logprobs=True, top_logprobs=2).wanted_logprobs() == 2
    assert chat(logprobs=True).wanted_logprobs() == 0
    assert chat(top_logprobs=2).wanted_logprobs() is None
    assert chat().prompts() == [MESSAGES]


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"tracewire": {"saves": "all"}}, "tracewire.saves"),
        ({"tracewire": {"intervention": []}}, "tracewire.intervention"),
        ({"tracewire": {"on_lag": "drop"}}, "tracewire.on_lag"),
        ({"tracewire": {"deadline": 0}}, "tracewire.deadline"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"logit_bias": {"seven": 1}}, "logit_bias.seven.[key]"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], at: str) -> None:
    assert at in [where for where, _ in refused(CompletionBody, {"model": "m", "prompt": "x", **fields})]


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_a_model_s_name_is_text(text: str) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"model": text, "prompt": "x"})


@pytest.mark.parametrize("on_lag", ["hold", "thin", "spill"])
def test_a_trace_can_lag_in_each_way_of_the_sdk(on_lag: str) -> None:
    assert completion(tracewire={"on_lag": on_lag}).extension.on_lag == on_lag


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_what_asks_for_nothing_is_taken(kind: type[OpenAIBody]) -> None:
    given = {"model": "m", "user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto"}
    body = kind.model_validate({**given, "prompt": "x"} if kind is CompletionBody else {**given, "messages": MESSAGES})
    assert body.model == "m"


def test_a_trace_says_which_prompts_it_was_given() -> None:
    assert list(TraceBody(model="m", prompt="x").given()) == ["prompt"]
    assert list(TraceBody(model="m", prompt="x", messages=MESSAGES).given()) == ["prompt", "messages"]


def test_numbers_are_finite() -> None:
    with pytest.raises(ValidationError):
        SteerBody.model_validate_json('{"values": {}, "if_version": -1}')
    with pytest.raises(ValidationError):
        CompletionBody.model_validate_json('{"model": "m", "prompt": "x", "temperature": NaN}')


MANY = 5000
FAULTS = [
    (CompletionBody, {"model": "m", "prompt": [{}] * MANY}, "prompt"),
    (CompletionBody, {"model": "m", "prompt": [[{}] * MANY] * 10}, "prompt"),
    (CompletionBody, {"model": "m", "prompt": "x", "stop": [1] * MANY}, "stop"),
    (CompletionBody, {"model": "m", "prompt": "x", "stop_token_ids": ["x"] * MANY}, "stop_token_ids"),
    (CompletionBody, {"model": "m", "prompt": "x", "logit_bias": {f"x{one}": 1 for one in range(MANY)}}, "logit_bias"),
    (CompletionBody, {"model": "m", "prompt": "x", "logit_bias": {str(one): "1" for one in range(MANY)}}, "logit_bias"),
    (CompletionBody, {"model": "m", "prompt": "x", **{f"x{one}": 1 for one in range(MANY)}}, "x0"),
    (ChatBody, {"model": "m", "messages": [1] * MANY}, "messages"),
    (ChatBody, {"model": "m", "messages": MESSAGES, "tools": [1] * MANY}, "tools"),
    (TraceBody, {"model": "m", "prompts": [1] * MANY}, "prompts"),
    (TraceBody, {"model": "m", "prompt": "x", "interventions": [1] * MANY}, "interventions"),
    (ResponsesBody, {"model": "m", "input": [1] * MANY}, "input"),
    (ResponsesBody, {"model": "m", "input": "x", "metadata": {str(one): 1 for one in range(MANY)}}, "metadata"),
    (ResponsesBody, {"model": "m", "input": "x", "tools": [{"type": "function"}] * MANY}, "tools"),
]


@pytest.mark.parametrize(("kind", "body", "at"), FAULTS)
def test_a_body_is_refused_by_its_first_fault(kind: type[Any], body: dict[str, Any], at: str) -> None:
    found = refused(kind, body)
    # One for each form that the value could have had.
    assert 1 <= len(found) <= 4
    assert found[0][0].split(".")[0] == at


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists of one of pydantic's schemas."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and "items_schema" in schema:
            yield schema
        for name, one in schema.items():
            # Values, not schemas.
            yield from lists(one) if name not in ("metadata", "default", "expected") else ()
    elif isinstance(schema, list | tuple):
        for one in schema:
            yield from lists(one)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, TraceBody, EditBody, EntryBody, ResponsesBody])
def test_no_list_collects_the_faults_of_all_its_items(kind: type[Any]) -> None:
    slow = [one for one in lists(kind.__pydantic_core_schema__) if not one.get("fail_fast")]
    assert [one for one in slow if one["items_schema"]["type"] != "any"] == []
