"""The options of a chat: the system message, tools, the chat template's variables; and tool calls as text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from tracewire.traces.output import Output
from tracewire_bus.wire.messages import ChatMessage

from .commands import UsageError
from .specs import named_value, values_by_name

__all__ = ["Conversation", "add_chat_options", "assistant_message", "conversation_of", "text_of"]


class Conversation(NamedTuple):
    """How a chat begins, and the options of `Client.trace` that are those of a chat."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument_group("chat").add_argument
    add("--system", metavar="TEXT", help="the system message")
    what = "the functions that the model may call: a JSON list of tools in OpenAI's form"
    add("--tools", type=_tools, metavar="FILE", help=what)
    what = "a variable of the chat template: enable_thinking=false (repeatable)"
    add("--template", type=named_value, action="append", default=[], metavar="NAME=VALUE", help=what)


def _tools(path: str) -> list[dict[str, Any]]:
    """An argparse converter for a file with tools."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a file with a JSON list of tools: {error}") from None
    if not isinstance(found, list) or not all(_is_tool(one) for one in found):
        raise argparse.ArgumentTypeError(
            f'{path}: expected a list of tools such as [{{"type": "function", "function": {{"name": ...}}}}]'
        )
    return found


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def conversation_of(options: argparse.Namespace, *, chats: bool = True) -> Conversation:
    """The conversation of the options of `add_chat_options`. Without `chats` there is none.

    Raises:
        UsageError: there is no chat, and an option is one of a chat.
    """
    if not chats:
        given = [name for name in ("system", "tools", "template") if getattr(options, name)]
        if given:
            raise UsageError(f"--{given[0]} is an option of a chat: give --chat")
        return Conversation([], {})
    found: dict[str, Any] = {}
    if options.tools:
        found["tools"] = options.tools
    if options.template:
        found["chat_template_kwargs"] = values_by_name(options.template)
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    return Conversation(messages, found)


def text_of(event: Output, *, begun: bool) -> str:
    """The text that an output adds: of a chat, what it adds to the message's reasoning, content and tool calls.

    A tool call begins a line, `-> name arguments`. `begun` is whether text came before.
    """
    if event.message is None:
        return event.text
    text = f"{event.message.reasoning or ''}{event.message.content or ''}"
    for call in event.message.tool_calls:
        if call.name is not None:
            text += f"{chr(10) if begun or text else ''}-> {call.name} "
        text += call.arguments
    return text


def assistant_message(message: ChatMessage) -> dict[str, Any]:
    """An answer as the messages of the next request have it."""
    found: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found
