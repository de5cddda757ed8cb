"""Answers in the form of OpenAI's responses: the whole, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tracewire import ChatMessage, MessageDelta
from tracewire_bus.wire.messages import Usage

from .continuity import Piece
from .openai_answers import ChatAnswer
from .responses_bodies import ResponsesBody

__all__ = ["PREFIX", "ResponseAnswer", "ResponseEvents", "response_of", "response_usage"]

#: What the id of a response has before that of its trace.
PREFIX = "resp_"


def response_usage(usage: Usage) -> dict[str, Any]:
    """The usage in the form of responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_of(trace_id: str, model: str, created: float, *, status: str, **more: Any) -> dict[str, Any]:
    """A response. `more` has further members, in place of the usual values."""
    return {
        "id": f"{PREFIX}{trace_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
        **more,
    }


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request."""
    choice = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": body.top_p,
    }


def end_of(reason: str | None) -> dict[str, Any]:
    """The status of a response that ended for this reason."""
    if reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def items_of(trace_id: str, message: ChatMessage, status: str, logprobs: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """The output of a response: reasoning, text and function calls."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        part = {"type": "reasoning_text", "text": message.reasoning}
        found.append({"type": "reasoning", "id": f"rs_{trace_id}", "summary": [], "content": [part], "status": status})
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content or "", "annotations": [], "logprobs": list(logprobs)}
        found.append(
            {"type": "message", "id": f"msg_{trace_id}", "role": "assistant", "status": status, "content": [text]}
        )
    for index, call in enumerate(message.tool_calls):
        found.append(
            {
                "type": "function_call",
                "id": f"fc_{trace_id}_{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return found


class ResponseAnswer(ChatAnswer):
    """The answer to a request for a response."""

    prefix = PREFIX
    body_kind = chunk_kind = "response"

    def __init__(self, *arguments: Any, asked: ResponsesBody, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._asked = asked
        self.trace_id = self._head["id"].removeprefix(PREFIX)

    def response(self, **more: Any) -> dict[str, Any]:
        """The response, with what `more` says in place of the usual values."""
        head = self.trace_id, self._head["model"], float(self._head["created"])
        return response_of(*head, **{"status": "in_progress", **_echo(self._asked), **more})

    def whole(self, index: int, piece: Piece) -> dict[str, Any]:
        """The parts of the response that its only choice has."""
        end = end_of(piece.finish_reason)
        logprobs = self.logprobs(piece)
        message = piece.whole or ChatMessage(content=piece.text)
        return {**end, "output": items_of(self.trace_id, message, end["status"], logprobs)}

    def body(self, choices: Sequence[Any], usage: Usage, **more: Any) -> dict[str, Any]:
        """See `Answer.body`."""
        (choice,) = choices
        own = {**more.pop("tracewire", {}), **choice.pop("tracewire", {})}
        return self.response(**choice, usage=response_usage(usage), tracewire=own, **more)

    def logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """The logprobs of a piece's tokens."""
        found = self._logprobs(piece)
        return found["content"] if found is not None else []


class ResponseEvents:
    """The events of a stream, in order, with their numbers."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._number = 0
        self._done: list[dict[str, Any]] = []
        #: The item that grows now, and its text so far.
        self._item: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        #: The logprobs of the message's tokens that had no text yet.
        self._waiting: list[Any] = []
        self._call = -1
        self.reason: str | None = None

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One event with the next number."""
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def begin(self, **more: Any) -> Iterator[dict[str, Any]]:
        """The events before all output."""
        yield self.event("created", response=self._answer.response(**more))
        yield self.event("in_progress", response=self._answer.response())

    def added(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of what a piece adds."""
        self.reason = piece.finish_reason or self.reason
        delta = piece.message or MessageDelta()
        if delta.reasoning or delta.tool_calls:
            # These had no text because they begin what comes now.
            self._waiting = []
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        if delta.content or not (delta.reasoning or delta.tool_calls):
            self._waiting += self._answer.logprobs(piece)
            if delta.content and (self._item is None or self._item["type"] != "message"):
                # Others end the reasoning, or a call.
                self._waiting = _spelling(self._waiting, delta.content)
        if delta.content:
            yield from self._grow("message", delta.content)
        for call in delta.tool_calls:
            if call.index != self._call:
                yield from self._close()
                self._call = call.index
                yield from self._open("function_call", call_id=call.id or "", name=call.name or "")
            if call.arguments:
                yield from self._grow("function_call", call.arguments)

    def end(self, usage: Usage, **more: Any) -> Iterator[dict[str, Any]]:
        """The events behind all output."""
        if self._item is None and not self._done:
            yield from self._open("message")
        yield from self._close()
        end = end_of(self.reason)
        response = self._answer.response(**end, output=self._done, usage=response_usage(usage), **more)
        yield self.event(end["status"], response=response)

    def failed(self, error: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The event in place of the rest."""
        told = {"code": error["code"], "message": error["message"]}
        return self.event("failed", response=self._answer.response(status="failed", error=told, **more))

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        trace_id, at = self._answer.trace_id, len(self._done)
        if kind == "reasoning":
            item = {"id": f"rs_{trace_id}", "summary": [], "content": []}
        elif kind == "message":
            item = {"id": f"msg_{trace_id}" + (f"_{at}" if at else ""), "role": "assistant", "content": []}
        else:
            item = {"id": f"fc_{trace_id}_{self._call}", "arguments": "", **fields}
        self._item, self._text, self._logprobs = {"type": kind, **item, "status": "in_progress"}, [], []
        yield self.event("output_item.added", output_index=at, item=dict(self._item))
        if kind != "function_call":
            yield self.event("content_part.added", **self._place(), content_index=0, part=self._part())

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._item is None or self._item["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text.append(text)
        if kind == "function_call":
            yield self.event("function_call_arguments.delta", **self._place(), delta=text)
        elif kind == "reasoning":
            yield self.event("reasoning_text.delta", **self._place(), content_index=0, delta=text)
        else:
            logprobs, self._waiting = self._waiting, []
            self._logprobs += logprobs
            more = {"delta": text, "logprobs": logprobs}
            yield self.event("output_text.delta", **self._place(), content_index=0, **more)

    def _close(self) -> Iterator[dict[str, Any]]:
        item = self._item
        if item is None:
            return
        text, place = "".join(self._text), self._place()
        if item["type"] == "message":
            self._logprobs += self._waiting
            self._waiting = []
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self.event("function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = self._part()
            item["content"] = [part]
            if item["type"] == "reasoning":
                yield self.event("reasoning_text.done", **place, content_index=0, text=text)
            else:
                more = {"text": text, "logprobs": self._logprobs}
                yield self.event("output_text.done", **place, content_index=0, **more)
            yield self.event("content_part.done", **place, content_index=0, part=part)
        item["status"] = "completed"
        self._item = None
        yield self.event("output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done)}

    def _part(self) -> dict[str, Any]:
        """The item's only part of content so far."""
        assert self._item is not None
        text = "".join(self._text)
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


def _spelling(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The last of these logprobs whose tokens are a text; all of them if none are."""
    for first in reversed(range(len(logprobs))):
        spelt = ""
        for last in range(first, len(logprobs)):
            spelt += logprobs[last]["token"]
            if spelt == text:
                return logprobs[first : last + 1]
    return logprobs
