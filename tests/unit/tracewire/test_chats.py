"""The options of chats, on their way into a submission."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire import TraceRejected
from tracewire.submission import make_submission, split_options
from tracewire_bus.wire.messages import Chat, Invoke

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ADD = {"type": "function", "function": {"name": "add"}}


def invokes(prompt: Any = None, prompts: Any = None, messages: Any = None, **options: Any) -> list[Invoke]:
    settings, sampling = split_options(options, prompts, messages)
    return make_submission("c", "tiny", prompt, None, settings, sampling).invokes


def test_messages_alone_are_a_chat() -> None:
    assert invokes(messages=MESSAGES, max_tokens=3) == [
        Invoke(chat=Chat(messages=MESSAGES), sampling={"max_tokens": 3})
    ]
    # As a prompt they stay what engines of every version read.
    assert invokes(MESSAGES) == [Invoke(messages=MESSAGES)]


def test_options_are_its_fields() -> None:
    (invoke,) = invokes(
        MESSAGES,
        tools=TOOLS,
        tool_choice=ADD,
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        include_reasoning=False,
        documents=[{"text": "x"}],
    )
    assert invoke.messages is None
    assert invoke.chat == Chat(
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=ADD,
        parallel_tool_calls=False,
        template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        include_reasoning=False,
        documents=[{"text": "x"}],
    )
    first, second = invokes(prompts=[MESSAGES, MESSAGES], tools=TOOLS)
    assert first.chat == second.chat == Chat(messages=MESSAGES, tools=TOOLS)


def test_a_continued_message_has_no_generation_prompt() -> None:
    (invoke,) = invokes(messages=MESSAGES, continue_final_message=True)
    assert invoke.chat is not None
    assert (invoke.chat.continue_final_message, invoke.chat.add_generation_prompt) == (True, False)


def test_a_message_with_tool_calls_needs_no_content() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    (invoke,) = invokes(messages=[*MESSAGES, {"role": "assistant", "tool_calls": calls}])
    assert invoke.chat is not None
    assert invoke.chat.messages[1]["tool_calls"] == calls


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"prompts": [MESSAGES, "b"], "tools": TOOLS}, "tools"),
        ({"messages": MESSAGES, "tools": "add"}, "tools"),
        ({"messages": MESSAGES, "tools": [1]}, "tools[0]"),
        ({"messages": MESSAGES, "tools": [{"a": object()}]}, "tools[0].a"),
        ({"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"messages": MESSAGES, "tools": TOOLS, "tool_choice": {"function": {"name": "b"}}}, "tool_choice"),
        ({"messages": MESSAGES, "chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": MESSAGES, "reasoning_effort": 3}, "reasoning_effort"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(TraceRejected) as raised:
        invokes(**given)
    assert raised.value.field == field
