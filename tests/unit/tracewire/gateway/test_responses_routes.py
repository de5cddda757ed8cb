"""OpenAI's responses over a scripted engine, by the stock client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import openai
import pytest

from tests.support.bus_engine import Stage, tiny
from tests.support.gateways import Served
from tracewire_bus.wire.messages import Chat, ChatMessage, MessageDelta, ToolCall, ToolCallDelta

Engine = Callable[..., Any]
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


async def thinking(stage: Stage) -> None:
    """Reasoning, then text, then a call of a function."""
    await stage.accept()
    await stage.output("hm", message=MessageDelta(reasoning="h"))
    await stage.output("hm", message=MessageDelta(reasoning="m", content="Let"))
    await stage.output(" me", message=MessageDelta(content=" me"))
    call = ToolCallDelta(index=0, id="call-1", name="add", arguments='{"a"')
    await stage.output("{", message=MessageDelta(tool_calls=[call]))
    more = MessageDelta(tool_calls=[ToolCallDelta(index=0, arguments=": 1}")])
    await stage.output("}", message=more, finish_reason="stop")
    calls = [ToolCall(id="call-1", name="add", arguments='{"a": 1}')]
    await stage.final(messages=[(0, 0, ChatMessage(content="Let me", reasoning="hm", tool_calls=calls))])


async def test_a_response_is_a_trace_and_can_be_had_again(engine: Engine, served: Served, client: Any) -> None:
    async with engine(tiny) as scripted, served.openai() as api:
        answer = await api.responses.create(
            model="tiny",
            input="Count.",
            instructions="Be brief.",
            max_output_tokens=7,
            temperature=0.5,
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}, "strict": True}},
        )
        assert (answer.output_text, answer.status, answer.model) == ("one two three", "incomplete", "tiny")
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 3, 6)
        assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0.5, 7)
        trace_id = answer.id.removeprefix("resp_")
        (taken,) = scripted.taken
        assert taken.trace == trace_id
        system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}
        assert taken.invokes[0].chat == Chat(messages=[system, user])
        sampling = {"max_tokens": 7, "temperature": 0.5, "structured_outputs": {"json": {"type": "array"}}}
        assert taken.invokes[0].sampling == sampling
        again = await api.responses.retrieve(answer.id)
        assert (again.output_text, again.status, again.usage) == ("one two three", "incomplete", answer.usage)
        assert (await api.responses.cancel(answer.id)).status == "incomplete"
        # No stream is better than an answer that the client does not expect.
        with pytest.raises(openai.BadRequestError, match=f"GET /traces/{trace_id}/events") as refused:
            await api.responses.retrieve(answer.id, stream=True, starting_after=3)
        assert refused.value.param == "stream"
        assert (await api.responses.retrieve(answer.id, stream=False)).status == "incomplete"


async def test_reasoning_text_and_calls_are_items(engine: Engine, served: Served) -> None:
    async with engine(thinking) as scripted, served.openai() as api:
        asked: dict[str, Any] = {"model": "tiny", "input": "Add.", "tools": [TOOL], "reasoning": {"effort": "low"}}
        whole = await api.responses.create(**asked, tool_choice={"type": "function", "name": "add"})
        async with await api.responses.create(**asked, stream=True) as stream:
            events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    streamed = events[-1].response
    for answer in (whole, streamed):
        reasoning, message, call = answer.output
        assert answer.status == "completed"
        assert reasoning.content[0].text == "hm"
        assert (message.content[0].text, answer.output_text) == ("Let me", "Let me")
        assert (call.name, call.arguments, call.call_id) == ("add", '{"a": 1}', "call-1")
    first, second = (taken.invokes[0].chat for taken in scripted.taken)
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert first.tools == second.tools == [{"type": "function", "function": function}]
    assert (first.tool_choice, second.tool_choice) == ({"type": "function", "function": {"name": "add"}}, None)
    assert first.reasoning_effort == "low"


async def test_what_went_before_comes_as_items(engine: Engine, served: Served) -> None:
    before: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "2?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me"}],
        },
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "add", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"role": "assistant", "content": "Four."},
        {"role": "assistant", "content": "Or so."},
    ]
    async with engine(tiny) as scripted, served.openai() as api:
        await api.responses.create(model="tiny", input=before)

    def call(number: str, arguments: str) -> dict[str, Any]:
        return {"id": number, "type": "function", "function": {"name": "add", "arguments": arguments}}

    calls = [call("1", "{}"), call("2", "[]")]
    assert scripted.taken[0].invokes[0].chat.messages == [
        {"role": "user", "content": "What is 2?"},
        {"role": "assistant", "reasoning": "hm", "content": "Let me", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": "Four."},
        {"role": "assistant", "content": "Or so."},
    ]


async def test_a_response_brings_saves_and_is_cancelled(engine: Engine, served: Served, client: Any) -> None:
    async def saving(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"norms": 1.5})
        await anyio.sleep_forever()

    async with engine(saving), served.openai() as api:
        more = {"tracewire": {"interventions": [], "detach": True}}
        async with await api.responses.create(model="tiny", input="x", stream=True, extra_body=more) as stream:
            async for event in stream:
                if event.type == "response.created":
                    name = event.response.id
                    assert event.response.tracewire == {"trace_id": name.removeprefix("resp_")}
                if event.type == "response.output_text.delta":
                    assert event.tracewire["delta"] == {"norms": [1.5]}
                    assert (await api.responses.retrieve(name)).status == "in_progress"
                    assert (await api.responses.cancel(name)).status == "cancelled"
            assert (event.type, event.response.error.code) == ("response.failed", "trace_cancelled")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    body: dict[str, Any], param: str, engine: Engine, served: Served
) -> None:
    async with engine(tiny), served.openai() as api:
        with pytest.raises(openai.BadRequestError) as raised:
            await api.responses.create(model="tiny", input="x", extra_body=body)
        assert raised.value.param == param, raised.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\ud800": "a"}])
async def test_metadata_that_cannot_be_sent_are_refused_before_anything_runs(
    metadata: dict[str, str], stream: bool, engine: Engine, served: Served
) -> None:
    body = json.dumps({"model": "tiny", "input": "x", "stream": stream, "metadata": metadata})
    async with engine(tiny) as scripted, served.http() as http:
        answer = await http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("metadata")
    assert scripted.taken == []


async def test_a_response_that_is_none_is_not_found(engine: Engine, served: Served) -> None:
    async with engine(tiny), served.openai() as api:
        for name in ("nothing", "resp_nothing", "resp_", "resp_é", "resp_a b", "resp_" + "x" * 300):
            for call in (api.responses.retrieve, api.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(name)
