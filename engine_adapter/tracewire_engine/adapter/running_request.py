"""One invoke of a trace while it runs in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tracewire_bus.wire.messages import ChatMessage, MessageDelta, RawOutput
from tracewire_bus.wire.pieces import Pieces
from tracewire_engine.protocol.messages import Generated, GeneratedChoice

from .engine_api import Choice, Outputs, Prepared
from .pending import PendingRecords
from .trace_stream import Acknowledgements

__all__ = ["RunningRequest"]


class RunningRequest:
    """A request, and its published part, by choice."""

    def __init__(
        self, name: str, invoke: int, prepared: Prepared, outputs: Outputs, pending: PendingRecords | None
    ) -> None:
        self.name = name
        self.invoke = invoke
        self.prepared = prepared
        self.outputs = outputs
        self.pending = pending
        self.token_ids: list[list[int]] = [[] for _ in range(prepared.choices)]
        self.text: list[list[str]] = [[] for _ in range(prepared.choices)]
        self.done = [False] * prepared.choices
        #: Why each choice ended, and its logprobs where they were asked for: for a block that asks for the result.
        self.ends: list[tuple[str | None, int | str | None]] = [(None, None)] * prepared.choices
        self.logprobs: list[list[Any]] = [[] for _ in range(prepared.choices)]
        self.given = False
        #: Of the outputs that the pump has queued last.
        self.acknowledgements = Acknowledgements()

    def publishable(
        self, choice: Choice, steps: list[msgspec.Raw | Pieces], decode: Callable[[list[int], Prepared], str]
    ) -> tuple[Choice, list[msgspec.Raw | Pieces]]:
        """The part of a choice's new tokens, and of the saves of their steps, that belongs to the trace.

        Tokens that vLLM sampled after a block had ended its request do not belong to the trace.
        """
        published = self.token_ids[choice.index]
        keep = len(choice.token_ids)
        pending = None if self.pending is None else self.pending.choices[choice.index]
        if pending is None or pending.ended_at is None or len(published) + keep <= pending.ended_at:
            return choice, steps
        keep = pending.ended_at + 1 - len(published)
        text = choice.text
        # The text in vLLM's output is not of the published tokens: it may have that of later tokens, and it lacks the
        # characters that may be the beginning of a stop string.
        whole = decode(published + choice.token_ids[:keep], self.prepared)
        before = "".join(self.text[choice.index])
        if whole.startswith(before):
            text = whole[len(before) :]
        self.done[choice.index] = True
        stopped = pending.ended == "stop"
        ended = Choice(
            index=choice.index,
            token_ids=choice.token_ids[:keep],
            text=text,
            logprobs=choice.logprobs[:keep] if choice.logprobs else choice.logprobs,
            finish_reason="stop" if stopped else "error",
            stop_reason=pending.reason if stopped else None,
        )
        return ended, steps[:keep]

    def take(self, choice: Choice) -> None:
        """Note the published part of a choice."""
        self.token_ids[choice.index].extend(choice.token_ids)
        self.text[choice.index].append(choice.text)
        if self.prepared.asks_result:
            self.ends[choice.index] = choice.finish_reason, choice.stop_reason
            self.logprobs[choice.index].extend(choice.logprobs or ())

    def output(
        self,
        choice: Choice,
        index: int,
        steps: list[msgspec.Raw | Pieces],
        strings: Callable[[list[int]], list[str]] | None,
        sampled_at: float,
    ) -> RawOutput:
        """The event of a choice's new tokens, the first of which has this index. It is not numbered yet.

        Raises:
            Rejection: vLLM's parser failed.
        """
        return RawOutput(
            # Named one by one: to unpack `UNNUMBERED` here would take longer than all else.
            attempt=0,
            seq=0,
            invoke=self.invoke,
            choice=choice.index,
            index=index,
            token_ids=choice.token_ids,
            text=choice.text,
            deltas=steps,
            token_strings=None if strings is None else strings(choice.token_ids),
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            time=sampled_at,
            message=self.message(choice),
        )

    def message(self, choice: Choice) -> MessageDelta | None:
        """What an output adds to its choice's message, if the request has messages. Called once for each output.

        Raises:
            Rejection: vLLM's parser failed.
        """
        if not self.prepared.parsers:
            return None
        parser = self.prepared.parsers[choice.index]
        return parser.delta(choice.text, choice.token_ids, choice.finish_reason is not None)

    def messages(self) -> list[tuple[int, int, ChatMessage]]:
        """The whole messages of the choices, by invoke and choice.

        Raises:
            Rejection: vLLM's parser failed.
        """
        return [
            (self.invoke, index, parser.whole("".join(self.text[index]), self.token_ids[index]))
            for index, parser in enumerate(self.prepared.parsers)
        ]

    def result(self, prompt: str | None) -> Generated:
        """The request's output, for its block, or for workers that must learn at which token the request ended."""
        choices = [
            GeneratedChoice(index, "".join(self.text[index]), ids, *self.ends[index], logprobs or None)
            for index, (ids, logprobs) in enumerate(zip(self.token_ids, self.logprobs, strict=True))
        ]
        tokens = list(map(len, self.token_ids))
        if not self.prepared.asks_result:
            return Generated(self.name, prompt, [], [], tokens)
        return Generated(self.name, prompt, self.prepared.token_ids, choices, tokens)
