"""The adapter's messages about ended requests: how many tokens each choice has, and `tracer.result`.

The worker keeps the parked block of an ended request in two cases. In one, the block waits for `tracer.result`, vLLM's
finished output, which the adapter has and sends. In the other, the adapter finds the request's end, by a stop string or
a stop condition, and by then the scheduler may have ended the request at a later token. When the adapter's message has
come, the block runs on to its end and the worker reports it. The adapter's message may come before or after the
scheduler's notice that the request has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from tracewire_engine.protocol.messages import Generated

__all__ = ["RequestResults", "output_of"]

_generated = msgspec.msgpack.Decoder(Generated)

#: How many of the adapter's messages are kept.
EARLY = 1024


class RequestResults:
    """The adapter's messages about ended requests, and the ended requests that wait for one, by the adapter's id."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Any]] = {}
        self._early: OrderedDict[str, tuple[RequestOutput | None, list[int]]] = OrderedDict()

    def take(self, encoded: bytes) -> tuple[str, list[Any]]:
        """Take the adapter's message about a request.

        Returns:
            The request's id, and the choices that waited for the message.
        """
        generated = _generated.decode(encoded)
        self._early[generated.request] = output_of(generated), generated.tokens
        while len(self._early) > EARLY:
            self._early.popitem(last=False)
        return generated.request, self.waiting.pop(generated.request, [])

    def has(self, request: str) -> bool:
        """Whether the adapter's message about a request has come."""
        return request in self._early

    def output(self, request: str) -> RequestOutput | None:
        """vLLM's finished output of a request; `None` if it has not come, or if the message had none."""
        return self._early.get(request, (None, []))[0]

    def tokens(self, request: str, choice: int) -> int | None:
        """How many tokens a choice has generated; `None` if the adapter's message has not come."""
        counts = self._early.get(request, (None, []))[1]
        return counts[choice] if choice < len(counts) else None

    def forget(self, request: str) -> None:
        """Drop the adapter's message about a request."""
        self._early.pop(request, None)


def output_of(generated: Generated) -> RequestOutput | None:
    """The finished output as vLLM itself would have made it; `None` if the message has no choices."""
    if not generated.choices:
        return None
    outputs = []
    for choice in generated.choices:
        logprobs: Any = None
        if choice.logprobs is not None:
            logprobs = [
                {token: Logprob(logprob, rank, text) for token, (logprob, rank, text) in entry.items()}
                for entry in choice.logprobs
            ]
        # The sum that vLLM itself reports.
        total = None
        if logprobs is not None:
            total = sum(
                entry[token].logprob for entry, token in zip(logprobs, choice.token_ids, strict=False) if token in entry
            )
        outputs.append(
            CompletionOutput(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                cumulative_logprob=total,
                logprobs=logprobs,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        )
    return RequestOutput(
        request_id=generated.request,
        prompt=generated.prompt,
        prompt_token_ids=generated.prompt_token_ids,
        prompt_logprobs=None,
        outputs=outputs,
        finished=True,
    )
