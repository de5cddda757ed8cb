"""The body of a request for a response, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tracewire_bus.wire.ids import is_encodable

from .bodies import Biases, Body, ChatBody, Extension, Items, NotServed, OfVllm, Text, by_first_fault
from .problems import Problem

__all__ = ["ResponsesBody"]

_LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: NotServed = None


class Reasoning(Body):
    """How much the model reasons."""

    effort: str | None = None
    summary: NotServed = None
    generate_summary: NotServed = None


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """The tool as chats have it."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class FunctionChoice(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: str = Field(min_length=1)


def _is_metadatum(name: str, text: Any) -> bool:
    return isinstance(text, str) and is_encodable(name) and is_encodable(text)


class ResponsesBody(OfVllm):
    """A request for a response. The last fields have no effect."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "demo", "input": "Say hello.", "max_output_tokens": 8}]}
    )
    model: Text = Field(min_length=1, examples=["demo"])
    input: str | Annotated[Items[dict[str, Any]], Field(min_length=1)] = Field(
        title="ResponseInput", examples=["Say hello."]
    )
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = Field(
        default=None, title="ResponseToolChoice"
    )
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    text: TextOptions | None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    watermarking: bool | None = None
    logit_bias: Biases = None
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    tracewire: Extension | None = None
    # What would have the gateway keep something, or run tools.
    previous_response_id: NotServed = None
    previous_input_messages: NotServed = None
    enable_response_messages: NotServed = None
    conversation: NotServed = None
    background: NotServed = None
    prompt: NotServed = None
    max_tool_calls: NotServed = None
    truncation: Literal["disabled"] | None = None
    stream_options: NotServed = None
    store: bool | None = None
    metadata: Annotated[dict[Text, Text] | None, by_first_fault(_is_metadatum)] = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def chat_body(self) -> ChatBody:
        """The request for a chat completion that this one stands for.

        Raises:
            Problem: an item of the input is none of a text model's.
        """
        names = ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys() - {"tools", "tool_choice"}
        given: dict[str, Any] = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        given |= {"messages": list(self.messages()), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            given["tools"] = [tool.tool() for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None and (self.tools or choice == "required"):
            given["tool_choice"] = choice
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        else:
            given.pop("top_logprobs", None)
        wanted = self.text.format if self.text is not None else None
        if wanted is not None and wanted.type != "text":
            schema = {"name": wanted.name, "schema": wanted.schema_}
            given["response_format"] = {"type": wanted.type, **({"json_schema": schema} if wanted.schema_ else {})}
        return ChatBody(**given)

    def messages(self) -> Iterator[dict[str, Any]]:
        """The input as chat messages. Items that belong to one message of the assistant become one.

        Raises:
            Problem: an item is none of a text model's.
        """
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        held: dict[str, Any] | None = None
        for index, item in enumerate(self.input):
            part = _message_of(item, f"input[{index}]")
            if held is not None and (part["role"] != "assistant" or held.keys() & part.keys() - {"role", "tool_calls"}):
                yield held
                held = None
            if part["role"] != "assistant":
                yield part
                continue
            calls = [*(held or {}).get("tool_calls", ()), *part.get("tool_calls", ())]
            held = {**(held or {}), **part, **({"tool_calls": calls} if calls else {})}
        if held is not None:
            yield held


def _message_of(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An item of the input as a chat message, or as a part of one of the assistant's."""
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str):
        return {"role": item["role"], "content": _text_of(item.get("content"), f"{field}.content")}
    if kind == "function_call":
        function = {name: _text(item, name, field) for name in ("name", "arguments")}
        call = {"id": _text(item, "call_id", field), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _text_of(item.get("output"), f"{field}.output")
        return {"role": "tool", "tool_call_id": _text(item, "call_id", field), "content": output}
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise _invalid(f"{field}.encrypted_content", "reasoning that is encrypted is not served")
        return {"role": "assistant", "reasoning": _text_of(item.get("content") or item.get("summary"), field)}
    raise _invalid(f"{field}.type", "expected message, function_call, function_call_output or reasoning")


def _text(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{field}.{name}", "expected text")
    return value


def _text_of(content: Any, field: str) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(field, "expected text, or a list of parts with text")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise _invalid(f"{field}[{index}]", "expected a part with text: images, files and audio are not served")
        texts.append(part["text"])
    return "".join(texts)


def _invalid(field: str, message: str) -> Problem:
    return Problem(400, f"{field}: {message}", code="invalid_request", field=field)
