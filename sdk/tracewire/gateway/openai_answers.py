"""Answers in OpenAI's form: bodies and chunks of completions and of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracewire import ChatMessage, MessageDelta, ToolCallDelta
from tracewire_bus.wire.messages import Usage

from .continuity import Piece

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "usage_of"]

#: A token's logprobs: by token id, `(logprob, rank, text)`.
Logprobs = Mapping[int, tuple[float, int | None, str | None]]


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finish_of(reason: str | None) -> str:
    """OpenAI's word for why a choice of a trace with a good end ended."""
    return reason if reason in ("stop", "length") else "stop"


class Answer:
    """The answer to one request. `top` is how many logprobs of each token it has, None for none."""

    #: Prefix of the answer's id, and its `object`, of the body and of a chunk.
    prefix = ""
    body_kind = ""
    chunk_kind = ""

    def __init__(self, trace_id: str, model: str, created: int, *, choices: int, top: int | None, ids: bool) -> None:
        self._per_prompt = choices
        self._top = top
        self._ids = ids
        self._head: dict[str, Any] = {"id": f"{self.prefix}{trace_id}", "created": created, "model": model}

    def index(self, invoke: int, choice: int) -> int:
        """The number of a choice in the answer."""
        return invoke * self._per_prompt + choice

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        return {**self._head, "object": self.chunk_kind, "choices": list(choices), **more}

    def body(self, choices: Sequence[Mapping[str, Any]], usage: Usage, **more: Any) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "object": self.body_kind,
            "choices": list(choices),
            "usage": usage_of(usage),
            "system_fingerprint": None,
            **more,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's part of the chunk before its text; None if there is none."""
        return None

    def empty(self, index: int = 0) -> dict[str, Any]:
        """A choice's part of a chunk that adds nothing to it."""
        return self.ended(index, None)

    def ended(self, index: int, reason: str | None) -> dict[str, Any]:
        """A choice's part of a chunk that ends it without text."""
        raise NotImplementedError

    def added(self, piece: Piece) -> dict[str, Any]:
        """A choice's part of a chunk with new text."""
        raise NotImplementedError

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a body. `piece` has all of its tokens."""
        raise NotImplementedError

    def _end(self, piece: Piece) -> dict[str, Any]:
        """The reasons for a choice's end, and its token ids if they are wanted."""
        reason = None if piece.finish_reason is None else finish_of(piece.finish_reason)
        found: dict[str, Any] = {"finish_reason": reason, "stop_reason": piece.stop_reason}
        if self._ids:
            found["token_ids"] = piece.token_ids
        return found


class CompletionAnswer(Answer):
    """The answer to a request for completions."""

    prefix = "cmpl-"
    body_kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, echoed: Sequence[str] = (), **named: Any) -> None:
        super().__init__(*arguments, **named)
        #: For each choice, how many characters it has so far.
        self._offsets: dict[int, int] = {}
        #: The prompts, if they stand before the text.
        self._echoed = echoed

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Answer.opening`."""
        return {**self.ended(index, None), "text": self._prompt(index)} if self._echoed else None

    def _prompt(self, index: int) -> str:
        return self._echoed[index // self._per_prompt] if self._echoed else ""

    def ended(self, index: int, reason: str | None) -> dict[str, Any]:
        """See `Answer.ended`."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def added(self, piece: Piece) -> dict[str, Any]:
        """See `Answer.added`."""
        index = self.index(piece.invoke, piece.choice)
        return {"index": index, "text": piece.text, "logprobs": self._logprobs(index, piece), **self._end(piece)}

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """See `Answer.whole`."""
        found = self.added(piece)
        return {**found, "text": self._prompt(index) + piece.text}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any] | None:
        if self._top is None or piece.logprobs is None:
            return None
        tokens, chosen, tops, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        for token_id, step in zip(piece.token_ids, piece.logprobs, strict=False):
            logprob, _, text = step.get(token_id, (None, None, None))
            tokens.append(text or "")
            chosen.append(logprob)
            tops.append({one[2] or "": one[0] for one in _ranked(step, len(step))})
            offsets.append(offset)
            offset += len(text or "")
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops if self._top else None,
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    """The answer to a request for a chat completion."""

    prefix = "chatcmpl-"
    body_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, *arguments: Any, named: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)
        #: Whether the request names the function to call. As in OpenAI's API, such a choice ends with `stop`.
        self._named = named
        #: The choices with tool calls.
        self._called: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `Answer.opening`."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def ended(self, index: int, reason: str | None) -> dict[str, Any]:
        """See `Answer.ended`."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def added(self, piece: Piece) -> dict[str, Any]:
        """See `Answer.added`."""
        index = self.index(piece.invoke, piece.choice)
        if piece.message is not None and piece.message.tool_calls:
            self._called.add(index)
        end = self._end(piece)
        if end["finish_reason"] == "stop" and index in self._called and not self._named:
            end["finish_reason"] = "tool_calls"
        return {"index": index, "delta": _delta(piece.message), "logprobs": self._logprobs(piece), **end}

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """See `Answer.whole`."""
        message = piece.whole or ChatMessage(content=piece.text)
        end = self._end(piece)
        if end["finish_reason"] == "stop" and message.tool_calls and not self._named:
            end["finish_reason"] = "tool_calls"
        return {"index": index, "message": _message(message), "logprobs": self._logprobs(piece), **end}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._top is None or piece.logprobs is None:
            return None
        content = []
        for token_id, step in zip(piece.token_ids, piece.logprobs, strict=False):
            chosen = step.get(token_id, (None, None, None))
            tops = [_token(one) for one in _ranked(step, self._top)]
            content.append({**_token(chosen), "top_logprobs": tops})
        return {"content": content, "refusal": None}


def _delta(delta: MessageDelta | None) -> dict[str, Any]:
    """A chunk's delta."""
    found: dict[str, Any] = {}
    if delta is None:
        return found
    if delta.content:
        found["content"] = delta.content
    if delta.reasoning:
        found["reasoning"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return found


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is not None:
        function = {"name": call.name, **function}
    head = {} if call.id is None else {"id": call.id, "type": "function"}
    return {"index": call.index, **head, "function": function}


def _message(message: ChatMessage) -> dict[str, Any]:
    """A body's message. As vLLM has it, `reasoning` is there where the model reasoned."""
    found: dict[str, Any] = {"role": message.role, "content": message.content, "refusal": None}
    if message.reasoning is not None:
        found["reasoning"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def _token(entry: tuple[float | None, int | None, str | None]) -> dict[str, Any]:
    text = entry[2] or ""
    return {"token": text, "logprob": entry[0], "bytes": list(text.encode("utf-8", "replace"))}


def _ranked(step: Logprobs, most: int) -> list[tuple[float, int | None, str | None]]:
    """The likeliest tokens of a step, best first."""
    return sorted(step.values(), key=lambda entry: -entry[0])[:most]
