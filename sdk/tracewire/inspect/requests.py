"""What Inspect asks of a model, as the keyword arguments of `Client.trace`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ContentReasoning,
    ContentText,
    GenerateConfig,
)
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

from tracewire.errors import TraceRejected
from tracewire.options import TraceOptions, check_names

from .declarations import interventions_in

__all__ = ["chat_options", "extra_options", "messages_of", "sampling_of"]

#: The fields of Inspect's configuration that are sampling params or chat options under the names of the values here.
_FIELDS = {
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "num_choices": "n",
    "parallel_tool_calls": "parallel_tool_calls",
    "presence_penalty": "presence_penalty",
    "reasoning_effort": "reasoning_effort",
    "reasoning_tokens": "thinking_token_budget",
    "seed": "seed",
    "stop_seqs": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}


def messages_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form.

    Raises:
        TraceRejected: one of them has other contents than text and reasoning.
    """
    return [_message(index, one) for index, one in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    content, reasoning = _contents(f"messages[{index}].content", message.content)
    found: dict[str, Any] = {"role": message.role, "content": content}
    if isinstance(message, ChatMessageAssistant):
        if reasoning:
            found["reasoning"] = reasoning
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
                }
                for call in message.tool_calls
            ]
    elif isinstance(message, ChatMessageTool):
        found["tool_call_id"] = message.tool_call_id or ""
        if message.function:
            found["name"] = message.function
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"
    return found


def _contents(field: str, content: Any) -> tuple[str, str]:
    """The text and the reasoning of a message, each without separators."""
    if isinstance(content, str):
        return content, ""
    text, reasoning = [], []
    for one in content:
        if isinstance(one, ContentText):
            text.append(one.text)
        elif isinstance(one, ContentReasoning):
            reasoning.append(one.summary or "" if one.redacted else one.reasoning)
        else:
            raise TraceRejected(field, f"expected text and reasoning, got {one.type!r}: media are not taken in chats")
    return "".join(text), "".join(reasoning)


def chat_options(tools: Sequence[ToolInfo], choice: ToolChoice) -> dict[str, Any]:
    """The tools, and which of them the model is to call."""
    if not tools:
        return {}
    described = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_dump(exclude_none=True),
            },
        }
        for tool in tools
    ]
    named: Any = {"any": "required", "auto": "auto", "none": "none"}.get(choice) if isinstance(choice, str) else None
    if isinstance(choice, ToolFunction):
        named = {"type": "function", "function": {"name": choice.name}}
    return {"tools": described, "tool_choice": named}


def sampling_of(config: GenerateConfig) -> dict[str, Any]:
    """The sampling params and chat options of Inspect's configuration, without those that it does not set.

    Without `max_tokens`, the model may fill its context.
    """
    found: dict[str, Any] = {"max_tokens": config.max_tokens}
    for field, name in _FIELDS.items():
        if (value := getattr(config, field)) is not None:
            found[name] = value
    if config.logprobs or config.top_logprobs:
        found["logprobs"] = config.top_logprobs or 0
    if config.response_schema is not None:
        schema = config.response_schema.json_schema.model_dump(exclude_none=True)
        found["structured_outputs"] = {"json": schema}
    return found


def extra_options(body: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of `Client.trace` in Inspect's `extra_body`, which hold for one generation.

    Raises:
        TraceRejected: one of them is no option of a trace, or an intervention is malformed; its field is its name after
            `extra_body.`.
    """
    found = dict(body or {})
    check_names(found, TraceOptions, "extra_body.")
    return {**found, "interventions": interventions_in(found.get("interventions", []), "extra_body.interventions")}
