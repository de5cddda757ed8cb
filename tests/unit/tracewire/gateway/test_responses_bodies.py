"""A request for a response is one for a chat completion."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tracewire.gateway.problems import Problem
from tracewire.gateway.responses_bodies import ResponsesBody

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def body(**fields: Any) -> ResponsesBody:
    return ResponsesBody(**{"model": "m", "input": "x", **fields})


def test_fields_of_the_same_name_and_meaning_go_over() -> None:
    chat = body(temperature=0.5, stop=["a"], logit_bias={"7": 1}, tracewire={"detach": True}).chat_body()
    assert (chat.temperature, chat.stop, chat.logit_bias) == (0.5, ["a"], {7: 1.0})
    assert chat.extension.detach
    # What was not given stays so.
    assert chat.sampling() == {"temperature": 0.5, "stop": ["a"], "logit_bias": {7: 1.0}}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_output_tokens": 5}, "max_completion_tokens", 5),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort", "low"),
        ({"top_logprobs": 2}, "logprobs", True),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", True),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "required"),
        ({"tool_choice": "auto"}, "tool_choice", None),
        ({"text": {"format": {"type": "text"}}}, "response_format", None),
    ],
)
def test_fields_of_other_names(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(body(**given).chat_body(), field) == value


def test_a_format_of_the_text() -> None:
    wanted = body(text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}).chat_body()
    assert wanted.response_format is not None
    assert wanted.response_format.json_schema is not None
    assert wanted.response_format.json_schema.schema_ == {"type": "array"}
    plain = body(text={"format": {"type": "json_object"}}).chat_body()
    assert plain.response_format is not None
    assert plain.response_format.type == "json_object"


def test_items_of_one_message_become_one() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    messages = list(body(input=[{"role": "assistant", "content": "a"}, call, call]).messages())
    assert [len(one["tool_calls"]) for one in messages] == [2]
    assert messages[0]["content"] == "a"
    apart = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert list(body(input=apart).messages()) == apart


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "web_search_call"}, "input[0].type"),
        ({"role": "user", "content": 3}, "input[0].content"),
        ({"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}, "input[0].output[0]"),
        ({"type": "reasoning", "encrypted_content": "x"}, "input[0].encrypted_content"),
    ],
)
def test_items_that_are_not_served_are_named(item: dict[str, Any], field: str) -> None:
    with pytest.raises(Problem) as raised:
        list(body(input=[item]).messages())
    assert raised.value.field == field


def test_other_tools_are_refused() -> None:
    with pytest.raises(ValidationError):
        body(tools=[{"type": "web_search"}])
