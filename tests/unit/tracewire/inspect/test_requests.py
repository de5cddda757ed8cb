"""What Inspect asks of a model, as a trace's keyword arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ResponseSchema,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolFunction, ToolInfo, ToolParam, ToolParams
from inspect_ai.util import JSONSchema

from tracewire import Probe, TraceRejected, UnknownOption
from tracewire.inspect.requests import chat_options, extra_options, messages_of, sampling_of

TOOL = ToolInfo(
    name="add",
    description="Adds.",
    parameters=ToolParams(properties={"x": ToolParam(type="integer", description="One.")}, required=["x"]),
)


def test_messages_have_openai_s_form() -> None:
    call = ToolCall(id="c1", function="add", arguments={"x": 1})
    thought = [ContentReasoning(reasoning="hm"), ContentText(text="so "), ContentText(text="there")]
    hidden = [ContentReasoning(reasoning="secret", summary="short", redacted=True), ContentText(text="x")]
    found = messages_of(
        [
            ChatMessageSystem(content="Be brief."),
            ChatMessageUser(content=[ContentText(text="1 + "), ContentText(text="1?")]),
            ChatMessageAssistant(content=thought, tool_calls=[call]),
            ChatMessageTool(content="2", tool_call_id="c1", function="add"),
            ChatMessageTool(content="", tool_call_id="c2", error=ToolCallError("timeout", "too slow")),
            ChatMessageAssistant(content=hidden),
        ]
    )
    assert found[0] == {"role": "system", "content": "Be brief."}
    assert found[1] == {"role": "user", "content": "1 + 1?"}
    assert (found[2]["content"], found[2]["reasoning"]) == ("so there", "hm")
    assert found[2]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    ]
    assert found[3] == {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    assert found[4] == {"role": "tool", "content": "Error: too slow", "tool_call_id": "c2"}
    assert found[5] == {"role": "assistant", "content": "x", "reasoning": "short"}


def test_an_image_is_refused_with_its_message() -> None:
    image = ContentImage(image="data:image/png;base64,AAAA")
    with pytest.raises(TraceRejected, match=r"messages\[1\]\.content: expected text and reasoning, got 'image'"):
        messages_of([ChatMessageSystem(content="x"), ChatMessageUser(content=[image])])


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        (ToolFunction("add"), {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_and_the_choice_of_one(choice: Any, named: Any) -> None:
    found = chat_options([TOOL], choice)
    assert found["tool_choice"] == named
    ((function),) = [one["function"] for one in found["tools"]]
    assert (function["name"], function["description"]) == ("add", "Adds.")
    assert function["parameters"]["properties"] == {"x": {"type": "integer", "description": "One."}}
    assert function["parameters"]["required"] == ["x"]
    json.dumps(found)
    assert chat_options([], choice) == {}


def test_the_configuration_is_sampling_params() -> None:
    schema = ResponseSchema(
        name="s", json_schema=JSONSchema(type="object", properties={"a": JSONSchema(type="string")})
    )
    config = GenerateConfig(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        stop_seqs=["x"],
        seed=1,
        num_choices=2,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        logit_bias={7: 1.0},
        parallel_tool_calls=False,
        reasoning_effort="low",
        reasoning_tokens=9,
        logprobs=True,
        top_logprobs=4,
        response_schema=schema,
    )
    structured = {"json": {"type": "object", "properties": {"a": {"type": "string"}}}}
    assert sampling_of(config) == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ["x"],
        "seed": 1,
        "n": 2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "logit_bias": {7: 1.0},
        "logprobs": 4,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "thinking_token_budget": 9,
        "structured_outputs": structured,
    }
    assert sampling_of(GenerateConfig()) == {"max_tokens": None}
    assert sampling_of(GenerateConfig(logprobs=True))["logprobs"] == 0


def test_options_of_one_generation() -> None:
    probe = Probe("p", "residual(1)")
    found = extra_options({"min_p": 0.1, "interventions": [probe], "live": {"alpha": 1.0}})
    assert found == {"min_p": 0.1, "interventions": [probe], "live": {"alpha": 1.0}}
    assert extra_options(None) == {"interventions": []}
    with pytest.raises(UnknownOption, match=r"extra_body.min_pp: 'min_pp' .* did you mean 'min_p'"):
        extra_options({"min_pp": 1})
    with pytest.raises(TraceRejected, match=r"extra_body.interventions\[0\]: expected an intervention"):
        extra_options({"interventions": [5]})
