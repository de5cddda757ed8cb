"""Chats by vLLM's own renderer and parsers, without an engine."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT
from tracewire_bus.domain.fold import extended
from tracewire_bus.wire.messages import Chat, ChatMessage, Invoke, MessageDelta, ToolCall, ToolCallDelta
from tracewire_engine.adapter.chats import ChatOptions, Chats, MessageParser
from tracewire_engine.adapter.engine_api import Rejection

MODEL = ROOT / "examples" / "demo_model" / "model"
MESSAGES = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HERMES = ChatOptions(tool_call_parser="hermes", enable_auto_tool_choice=True)


@pytest.fixture(scope="module")
def llm() -> Any:
    """What of an `AsyncLLM` renders chats, for the demo model."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers import renderer_from_config

    config = AsyncEngineArgs(model=str(MODEL), enforce_eager=True).create_engine_config()
    renderer = renderer_from_config(config)
    yield SimpleNamespace(model_config=config.model_config, renderer=renderer)
    renderer.shutdown()


async def rendered(llm: Any, options: ChatOptions, sampling: dict[str, Any] | None = None, **chat: Any) -> Any:
    given = Chat(messages=MESSAGES, **chat)
    return await Chats(llm, options).render(Invoke(chat=given, sampling=sampling or {}), given, "")


def folded(parser: MessageParser, text: str, size: int = 3) -> ChatMessage | None:
    """A text's message, from its deltas."""
    message = None
    for start in range(0, len(text), size):
        delta = parser.delta(text[start : start + size], [5], start + size >= len(text))
        message = message if delta is None else extended(message, delta)
    return message


async def test_a_prompt_is_the_template_s(llm: Any) -> None:
    chat = await rendered(llm, ChatOptions())
    assert llm.renderer.tokenizer.decode(chat.token_ids) == "# user:\nhi\n\n# assistant:\n"
    assert chat.reasoning == {}
    (parser,) = chat.parsers(1)
    assert (folded(parser, "some text"), parser.whole("some text", [5])) == (ChatMessage(content="some text"),) * 2
    # Messages that no `Chat` came with have no message for an answer.
    plain = Chat(messages=MESSAGES)
    prompt = await Chats(llm, ChatOptions()).render(Invoke(messages=MESSAGES), plain, "")
    assert (prompt.token_ids, prompt.parsers(2)) == (chat.token_ids, [])


async def test_variables_of_the_template_and_its_defaults(llm: Any) -> None:
    template = "{{ messages[0]['content'] }}{{ mood }}{{ reasoning_effort or '' }}"
    options = ChatOptions(chat_template=template, default_chat_template_kwargs={"mood": " calm"})
    decode = llm.renderer.tokenizer.decode
    assert decode((await rendered(llm, options)).token_ids) == "hi calm"
    chat = await rendered(llm, options, template_kwargs={"mood": " wild"}, reasoning_effort="low")
    assert decode(chat.token_ids) == "hi wildlow"


@pytest.mark.parametrize("choice", [None, "auto", "required"])
async def test_tool_calls_are_found_in_pieces_and_at_once(llm: Any, choice: str | None) -> None:
    chat = await rendered(llm, HERMES, tools=[ADD], tool_choice=choice)
    assert chat.params.skip_special_tokens is False
    assert (chat.params.structured_outputs is not None) == (choice == "required")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"{call}\n{call}"
    (parser,) = chat.parsers(1)
    message, whole = folded(parser, text), parser.whole(text, [5])
    assert message is not None
    assert [one.name for one in message.tool_calls] == [one.name for one in whole.tool_calls] == ["add", "add"]
    assert [one.id for one in message.tool_calls] == [one.id for one in whole.tool_calls]
    assert len({one.id for one in whole.tool_calls}) == 2
    for one in (message, whole):
        assert [json.loads(call.arguments) for call in one.tool_calls] == [{"a": 1}] * 2
    (single,) = (await rendered(llm, HERMES, tools=[ADD], parallel_tool_calls=False)).parsers(1)
    message = folded(single, text)
    assert message is not None
    assert (len(message.tool_calls), len(single.whole(text, [5]).tool_calls)) == (1, 1)


async def test_a_constraint_of_the_caller_stays_without_forced_tools(llm: Any) -> None:
    chat = await rendered(llm, ChatOptions(), {"structured_outputs": {"choice": ["a", "b"]}})
    assert chat.params.structured_outputs.choice == ["a", "b"]
    assert chat.params.skip_special_tokens is True


async def test_reasoning_is_apart_from_the_content(llm: Any) -> None:
    options = ChatOptions(reasoning_parser="qwen3")
    chat = await rendered(llm, options)
    assert chat.reasoning["reasoning_ended"] is False
    assert "chat_template_kwargs" in chat.reasoning["reasoning_parser_kwargs"]
    (parser,) = chat.parsers(1)
    text = "<think>first</think>then"
    wanted = ChatMessage(content="then", reasoning="first")
    assert (folded(parser, text), parser.whole(text, [5])) == (wanted, wanted)
    hidden = await rendered(llm, options, include_reasoning=False)
    (parser,) = hidden.parsers(1)
    assert (folded(parser, text), parser.whole(text, [5])) == (ChatMessage(content="then"),) * 2
    assert hidden.reasoning["reasoning_ended"] is True


@pytest.mark.parametrize(
    ("options", "chat", "field", "says"),
    [
        (HERMES, {"tools": [{"type": "function"}]}, "tools[0]", "function"),
        (HERMES, {"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0]", "function"),
        (HERMES, {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "name"),
        (HERMES, {"tools": [{"function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters", "schema"),
        (
            HERMES,
            {"tools": [ADD, {"function": {"name": "a", "parameters": {"properties": {"x": {"type": "y"}}}}}]},
            "tools[1].function.parameters.properties.x.type",
            "'y' is not valid",
        ),
        (HERMES, {"tools": [ADD], "tool_choice": "some"}, "tool_choice", "none, auto, required"),
        (HERMES, {"tools": [ADD], "tool_choice": {"function": {"name": "b"}}}, "tool_choice", "which are add"),
        (HERMES, {"tool_choice": "auto"}, "tool_choice", "expected tools"),
        (ChatOptions(), {"tools": [ADD], "tool_choice": "required"}, "tool_choice", "--tool-call-parser"),
        (ChatOptions(), {"tools": [ADD]}, "tools", "--tool-call-parser"),
        (ChatOptions(), {"template_kwargs": {"chat_template": "x"}}, "messages", "emplate"),
        (ChatOptions(), {"reasoning_effort": "some"}, "reasoning_effort", "'low'"),
        (ChatOptions(chat_template="{{ raise_exception('no!') }}"), {}, "messages", "no!"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_field(
    llm: Any, options: ChatOptions, chat: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(Rejection) as raised:
        await rendered(llm, options, **chat)
    assert raised.value.failure.field == field
    assert says in raised.value.failure.message


async def test_a_model_without_a_template_says_so(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.renderer.tokenizer, "chat_template", None)
    with pytest.raises(Rejection, match="no chat template: start the engine with --chat-template") as raised:
        await rendered(llm, ChatOptions())
    assert raised.value.failure.field == "messages"


def test_a_parser_that_vllm_lacks_is_a_type_error(llm: Any) -> None:
    with pytest.raises(TypeError, match="not been registered"):
        Chats(llm, ChatOptions(tool_call_parser="nothing", enable_auto_tool_choice=True))


async def test_a_template_runs_on_a_thread(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    apply = llm.renderer.tokenizer.apply_chat_template

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return apply(*arguments, **options)

    monkeypatch.setattr(llm.renderer.tokenizer, "apply_chat_template", noted)
    await rendered(llm, ChatOptions())
    assert threads
    assert threading.get_ident() not in threads


class Failing:
    """A parser of vLLM that fails, or that leaves numbers out."""

    reasoning_parser = None

    def __init__(self, *found: Any) -> None:
        self.found = list(found)

    def parse_delta(self, *_: Any, **__: Any) -> Any:
        return self.found.pop(0)

    def parse(self, *_: Any, **__: Any) -> Any:
        raise KeyError("arguments")


def test_a_parser_s_failure_is_a_rejection_and_its_numbers_are_ours() -> None:
    def call(index: int, **fields: Any) -> Any:
        function = SimpleNamespace(**{"name": None, "arguments": "", **fields})
        one = SimpleNamespace(index=index, id=None, function=function)
        return SimpleNamespace(content=None, reasoning=None, tool_calls=[one])

    request = SimpleNamespace(include_reasoning=True, parallel_tool_calls=True)
    failing = Failing(call(3, name="add"), None, call(3, arguments="{}"))
    parser = MessageParser(request, lambda: failing, True, [1])
    first, nothing, second = (parser.delta("x", [1], False) for _ in range(3))
    assert first is not None
    (begun,) = first.tool_calls
    assert (begun.index, begun.name, bool(begun.id)) == (0, "add", True)
    assert nothing is None
    assert second == MessageDelta(tool_calls=[ToolCallDelta(index=0, arguments="{}")])
    for failed in (lambda: parser.delta("x", [1], False), lambda: parser.whole("x", [1])):
        with pytest.raises(Rejection, match="vLLM's parser failed") as raised:
            failed()
        assert raised.value.failure.type == "OutputParserError"
    assert ToolCall(id="", name="add") != begun
