"""A trace's result as Inspect's output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    StopReason,
    TopLogprob,
)
from inspect_ai.tool import ToolCall

from tracewire.traces.output import Gap, Item, Output, Restarted
from tracewire.traces.state import Choice, Result
from tracewire_bus.wire.messages import ChatMessage, Usage

from .metadata import summary

__all__ = ["TokenLogprobs", "output_of"]

#: The logprobs of one token: by token id, `(logprob, rank, text)`.
_Step = Mapping[int, tuple[float, int | None, str | None]]


class TokenLogprobs:
    """The log probabilities of a trace's tokens, by choice, gathered from its items as they come."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[tuple[int, _Step]]] = {}
        self._whole = True

    def add(self, item: Item) -> None:
        """Take an item of the trace."""
        if isinstance(item, Restarted):
            # The next attempt begins at the first token.
            self._tokens, self._whole = {}, True
        elif isinstance(item, Gap):
            # Redis has dropped outputs, and their log probabilities with them.
            self._whole = False
        elif isinstance(item, Output) and item.logprobs is not None:
            steps = zip(item.token_ids, item.logprobs, strict=False)
            self._tokens.setdefault(item.choice, []).extend(steps)

    def of(self, choice: int, top: int) -> Logprobs | None:
        """Those of a choice, each with `top` alternatives; None if there are not those of all tokens."""
        found = self._tokens.get(choice)
        if found is None or not self._whole:
            return None
        return Logprobs(content=[_logprob(token_id, step, top) for token_id, step in found])


def _logprob(token_id: int, step: _Step, top: int) -> Logprob:
    logprob, _, text = step[token_id]
    ranked = sorted(step.values(), key=lambda one: -one[0])[:top]
    return Logprob(
        token=text or "",
        logprob=logprob,
        bytes=list((text or "").encode()),
        top_logprobs=[TopLogprob(token=one[2] or "", logprob=one[0]) for one in ranked] if top else None,
    )


def output_of(
    model: str,
    result: Result,
    *,
    max_tokens: int | None,
    logprobs: TokenLogprobs | None = None,
    top: int = 0,
    seconds: float | None = None,
    where: Mapping[str, str] | None = None,
) -> ModelOutput:
    """The output of one generation.

    Args:
        model: the model's name without the provider's.
        result: the trace's result; its prompt is the only one.
        max_tokens: how many tokens were asked for at most.
        logprobs: the log probabilities of its tokens, each with `top` alternatives, if they were asked for.
        seconds: how long the generation took.
        where: the URL and the prefix of the bus that has the trace.
    """
    choices = [one for invoke in result.invokes for one in invoke.choices]
    metadata: dict[str, Any] = {"trace_id": result.trace_id, **(where or {})}
    metadata["saves"] = summary(choices[0].saves) if choices else {}
    if len(choices) > 1:
        metadata["choice_saves"] = [summary(one.saves) for one in choices]
    if result.shared:
        metadata["shared"] = summary(result.shared)
    if result.save_errors:
        metadata["save_errors"] = result.save_errors
    if result.live_version:
        metadata["live_version"] = result.live_version
    return ModelOutput(
        model=model,
        choices=[
            ChatCompletionChoice(
                message=_message(model, one),
                stop_reason=_stop_reason(one, max_tokens, stopped=result.status == "stopped"),
                logprobs=None if logprobs is None else logprobs.of(one.choice, top),
            )
            for one in choices
        ],
        usage=_usage(result.usage),
        time=seconds,
        metadata=metadata,
        response_id=result.trace_id,
    )


def _message(model: str, choice: Choice) -> ChatMessageAssistant:
    message = choice.message or ChatMessage(content=choice.text)
    content: str | list[Content] = message.content or ""
    if message.reasoning:
        content = [ContentReasoning(reasoning=message.reasoning), ContentText(text=message.content or "")]
    calls = [_tool_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    return ChatMessageAssistant(content=content, tool_calls=calls or None, model=model, source="generate")


def _tool_call(name: str, function: str, text: str) -> ToolCall:
    """A tool call. Inspect shows the model what is wrong with arguments that are no JSON object."""
    error = None
    try:
        arguments = json.loads(text or "{}")
        if not isinstance(arguments, dict):
            arguments, error = {}, f"expected the arguments as a JSON object, got {text}"
    except (ValueError, RecursionError) as fault:
        arguments, error = {}, f"expected the arguments as a JSON object, got {text}: {fault}"
    return ToolCall(id=name, function=function, arguments=arguments, parse_error=error)


def _stop_reason(choice: Choice, max_tokens: int | None, *, stopped: bool) -> StopReason:
    if choice.finish_reason == "length":
        return "max_tokens" if max_tokens is not None and len(choice.token_ids) >= max_tokens else "model_length"
    if choice.message is not None and choice.message.tool_calls:
        return "tool_calls"
    return "stop" if stopped or choice.finish_reason == "stop" else "unknown"


def _usage(usage: Usage) -> ModelUsage:
    return ModelUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        input_tokens_cache_read=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
