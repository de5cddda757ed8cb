"""Each token once: the outputs of a trace without what an earlier attempt, or a gap, has brought already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracewire import (
    ChatMessage,
    Gap,
    Item,
    MessageDelta,
    Output,
    Restarted,
    TextChanged,
    ToolCallDelta,
    Values,
)
from tracewire.traces.output import merged
from tracewire_bus.domain.fold import extended

__all__ = ["Continuity", "Piece"]


@dataclass(slots=True)
class Piece:
    """What one event adds to one choice.

    Attributes:
        invoke, choice: the prompt and the choice.
        index: the index of the first of `token_ids` in the choice.
        text, token_ids: the text and the tokens that are new.
        logprobs: for each token, if requested, a dict from token id to `(logprob, rank, text)`.
        delta: the additions to the saves; empty after a gap, whose state has them.
        finish_reason, stop_reason: vLLM's words, where the choice ends here.
        message: of a chat, what is new in its message.
        whole: of a chat that has ended, its message.
    """

    invoke: int
    choice: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Any]] | None
    delta: Values
    finish_reason: str | None
    stop_reason: int | str | None
    message: MessageDelta | None = None
    whole: ChatMessage | None = None


@dataclass(slots=True)
class _Sent:
    """What of a choice was handed out."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False
    #: How many characters of a text that begins anew have come; None where the text goes on.
    repeated: int | None = None
    message: ChatMessage | None = None
    #: The message that begins anew, until it has all of `message`; None where the message goes on.
    again: ChatMessage | None = None

    def begin_again(self) -> None:
        """The text and the message begin anew."""
        self.repeated = 0
        self.again = ChatMessage()


class Continuity:
    """The tokens of one trace's choices, each once."""

    def __init__(self, trace_id: str) -> None:
        self._trace_id = trace_id
        self._sent: dict[tuple[int, int], _Sent] = {}

    def pieces(self, item: Item, *, saves: bool = True) -> list[Piece]:
        """What an event adds. With `saves`, pieces have their deltas.

        Raises:
            TextChanged: the trace runs again, and its tokens or its text differ from those handed out.
        """
        match item:
            case Output():
                return self._output(item, saves)
            case Gap():
                return self._gap(item)
            case Restarted():
                for sent in self._sent.values():
                    sent.begin_again()
        return []

    def unfinished(self, prompts: int, choices: int) -> list[tuple[int, int]]:
        """Of so many prompts with so many choices each, those whose end was not handed out."""
        return [
            (invoke, choice)
            for invoke in range(prompts)
            for choice in range(choices)
            if (sent := self._sent.get((invoke, choice))) is None or not sent.ended
        ]

    def _output(self, output: Output, saves: bool) -> list[Piece]:
        sent = self._sent.setdefault((output.invoke, output.choice), _Sent())
        skip = self._advance(sent, output.index, output.token_ids)
        text = self._text(sent, output.text)
        ended = output.finish_reason is not None and not sent.ended
        sent.ended = sent.ended or ended
        delta = Values()
        if saves and (skip < len(output.token_ids) or not output.token_ids):
            delta = output.delta if not skip else merged(output.deltas[skip:])
        new = output.token_ids[skip:]
        message = self._message(sent, output.message)
        if not (new or text or ended or delta or message):
            return []
        return [
            Piece(
                output.invoke,
                output.choice,
                output.index + skip,
                text,
                new,
                None if output.logprobs is None else output.logprobs[skip:],
                delta,
                output.finish_reason if ended else None,
                output.stop_reason if ended else None,
                message,
            )
        ]

    def _gap(self, gap: Gap) -> list[Piece]:
        found = []
        for choice in (choice for invoke in gap.state.invokes for choice in invoke.choices):
            sent = self._sent.setdefault((choice.invoke, choice.choice), _Sent())
            skip = self._advance(sent, 0, choice.token_ids)
            sent.begin_again()
            text = self._text(sent, choice.text)
            message = self._message(sent, _as_delta(choice.message))
            ended = choice.finish_reason is not None and not sent.ended
            sent.ended = sent.ended or ended
            new = choice.token_ids[skip:]
            if new or text or ended or message:
                reasons = (choice.finish_reason, choice.stop_reason) if ended else (None, None)
                found.append(Piece(choice.invoke, choice.choice, skip, text, new, None, Values(), *reasons, message))
        return found

    def _advance(self, sent: _Sent, index: int, token_ids: Sequence[int]) -> int:
        """Take tokens from `index` on. Returns how many of them were handed out before."""
        held = sent.token_ids
        skip = max(0, min(len(held) - index, len(token_ids)))
        if held[index : index + skip] != list(token_ids[:skip]):
            raise self._changed(sent)
        held.extend(token_ids[skip:])
        return skip

    def _text(self, sent: _Sent, text: str) -> str:
        """The part of a text that was not handed out."""
        if sent.repeated is not None:
            whole = "".join(sent.parts)
            sent.parts = [whole]
            expected = whole[sent.repeated : sent.repeated + len(text)]
            if not text.startswith(expected):
                raise self._changed(sent)
            sent.repeated += len(text)
            if sent.repeated >= len(whole):
                sent.repeated = None
            text = text[len(expected) :]
        if text:
            sent.parts.append(text)
        return text

    def _message(self, sent: _Sent, delta: MessageDelta | None) -> MessageDelta | None:
        """The part of an addition to a message that was not handed out."""
        if delta is None:
            return None
        if sent.again is None:
            sent.message = extended(sent.message, delta)
            return delta
        sent.again = extended(sent.again, delta)
        try:
            found = beyond(sent.again, sent.message or ChatMessage())
        except ValueError:
            raise self._changed(sent) from None
        if found is None:
            return None
        sent.message = extended(sent.message, found)
        sent.again = None
        return found if found != MessageDelta() else None

    def _changed(self, sent: _Sent) -> TextChanged:
        return TextChanged(self._trace_id, sum(map(len, sent.parts)))


def _as_delta(message: ChatMessage | None) -> MessageDelta | None:
    """A whole message as an addition to an empty one."""
    return None if message is None else _difference(message, ChatMessage())


def beyond(message: ChatMessage, sent: ChatMessage) -> MessageDelta | None:
    """What a message that begins anew has beyond the one that was sent; None while it has less.

    Raises:
        ValueError: the two differ.
    """
    pairs = [*_parts(message, sent)]
    if not all(now.startswith(then) or then.startswith(now) for now, then in pairs):
        raise ValueError("another message")
    if len(message.tool_calls) < len(sent.tool_calls) or not all(now.startswith(then) for now, then in pairs):
        return None
    return _difference(message, sent)


def _parts(message: ChatMessage, sent: ChatMessage) -> Iterator[tuple[str, str]]:
    """The texts of two messages, in pairs. The ids of tool calls are not compared: each attempt makes its own."""
    yield message.content or "", sent.content or ""
    yield message.reasoning or "", sent.reasoning or ""
    for now, then in zip(message.tool_calls, sent.tool_calls, strict=False):
        yield now.name, then.name
        yield now.arguments, then.arguments


def _difference(message: ChatMessage, sent: ChatMessage) -> MessageDelta:
    calls = []
    for index, call in enumerate(message.tool_calls):
        if index < len(sent.tool_calls):
            if more := call.arguments[len(sent.tool_calls[index].arguments) :]:
                calls.append(ToolCallDelta(index=index, arguments=more))
        else:
            calls.append(ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments))
    return MessageDelta(
        content=(message.content or "")[len(sent.content or "") :],
        reasoning=(message.reasoning or "")[len(sent.reasoning or "") :],
        tool_calls=calls,
    )
