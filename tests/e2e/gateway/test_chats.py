"""Chats before a real engine: templates and tool calls, by the SDK, by the gateway, and by vLLM's own server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

import tracewire
from tests.support.gateways import Served, serving
from tracewire import Client, Model, TraceRejected
from tracewire_bus.domain.fold import extended

MESSAGES = [{"role": "user", "content": "Add some numbers."}]
TEXT = "# user:\nAdd some numbers.\n\n# assistant:\n"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 120}
NUMBER = {"type": "integer", "enum": [1, 2, 3]}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SAY = {"type": "function", "function": {**ADD["function"], "name": "say"}}
NAMED = {"type": "function", "function": {"name": "say"}}


@pytest.fixture
async def served(engine_bus: str, model: Model) -> AsyncIterator[Served]:
    """A gateway of the shared engine's bus."""
    async with serving(engine_bus, "tw") as served:
        yield served


@pytest.fixture
async def api(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of it."""
    async with served.openai() as api:
        yield api


@pytest.fixture
async def vllm(client: Client, model: Model) -> AsyncIterator[openai.AsyncOpenAI]:
    """The stock client of vLLM's own server on the same engine."""
    (engine,) = await client._session.open_bus().registry.list()
    async with openai.AsyncOpenAI(base_url=engine.openai, api_key="none", max_retries=0, timeout=60) as api:
        yield api


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """The functions that a message calls, with their arguments."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def streamed(stream: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """The content, the tool calls and the reason for the end of a stream."""
    content, calls, reason = "", [], None
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_tool_call_is_that_of_vllm_s_own_server(
    choice: Any, reason: str, api: openai.AsyncOpenAI, vllm: openai.AsyncOpenAI, client: Client
) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "tools": [ADD, SAY], "tool_choice": choice}
    request = {"model": "demo", **asked, "parallel_tool_calls": False, **GREEDY}
    theirs = (await vllm.chat.completions.create(**request)).choices[0]
    ours = (await api.chat.completions.create(**request)).choices[0]
    (called,) = calls_of(ours.message)
    assert [called] == calls_of(theirs.message)
    assert set(called[1]) == {"a", "b"}
    assert choice == "required" or called[0] == "say"
    assert (ours.finish_reason, theirs.finish_reason) == (reason, reason)
    # Streamed: the same, in pieces.
    _, calls, streamed_reason = await streamed(await api.chat.completions.create(**request, stream=True))
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [called]
    assert streamed_reason == reason
    # And by the SDK, whose outputs fold to the result's message.
    folded = None
    async with client.trace("demo", parallel_tool_calls=False, **asked, **GREEDY) as trace:
        async for output in trace.outputs():
            if output.message is not None:
                folded = extended(folded, output.message)
        result = await trace.result()
    assert folded is not None
    assert result.message is not None
    for message in (folded, result.message):
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [called]
    assert [call.id for call in folded.tool_calls] == [call.id for call in result.message.tool_calls]
    state = await client.get_state(trace.id)
    assert state.message == result.message


async def test_without_tool_calls_the_message_is_the_text(api: openai.AsyncOpenAI, client: Client) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    plain = await client.trace("demo", TEXT, **options).result()
    result = await client.trace("demo", messages=MESSAGES, tools=[ADD], tool_choice="none", **options).result()
    assert result.message == tracewire.ChatMessage(content=plain.text)
    answer = await api.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0.0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert [choice.message.content for choice in answer.choices] == [plain.text]
    # Messages that are a prompt are one, and nothing more.
    prompt = await client.trace("demo", MESSAGES, **options).result()
    assert (prompt.text, prompt.message) == (plain.text, None)


async def test_the_template_gets_its_variables(
    api: openai.AsyncOpenAI, vllm: openai.AsyncOpenAI, client: Client
) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
    plain = await client.trace("demo", f"{TEXT}def f(", ignore_eos=True, **options).result()
    more = {"chat_template_kwargs": {"prefill": "def f("}, "ignore_eos": True}
    for one in (api, vllm):
        answer = await one.chat.completions.create(model="demo", messages=MESSAGES, extra_body=more, **options)
        assert answer.choices[0].message.content == plain.text
    # The last message goes on.
    begun = [*MESSAGES, {"role": "assistant", "content": "def f("}]
    result = await client.trace(
        "demo", messages=begun, continue_final_message=True, ignore_eos=True, **options
    ).result()
    assert result.accepted.prompt_token_ids == plain.accepted.prompt_token_ids
    assert result.message.content == plain.text


BROKEN = {"type": "function", "function": {"name": "add", "parameters": {"type": "nothing"}}}


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"tools": [BROKEN]}, "tools[0].function.parameters.type", "JSON schema"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
        ({"tools": [ADD], "tool_choice": NAMED}, "tool_choice", "add"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "messages", "template"),
        ({"reasoning_effort": "some"}, "reasoning_effort", "medium"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_is_refused_with_its_field(
    options: dict[str, Any], field: str, says: str, stream: bool, api: openai.AsyncOpenAI, client: Client
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await api.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4, stream=stream, extra_body=options
        )
    assert (raised.value.param, says in raised.value.message) == (field, True), raised.value.message
    with pytest.raises(TraceRejected) as refused:
        await client.trace("demo", messages=MESSAGES, max_tokens=4, **options).result()
    assert refused.value.field == field
