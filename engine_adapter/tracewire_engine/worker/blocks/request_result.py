"""The adapter's word on a request's end: at which token it is, and `tracer.result`, vLLM's finished output.

A block that waits for the result when its request ends is kept, parked, until the adapter has sent what was generated;
it then runs on to its end, and is reported. So is a request whose end the adapter finds in its output, by a stop string
or a stop condition: by then the scheduler may have ended it at a later token. The adapter's word and the scheduler's
may come in either order.
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

#: How many outputs are kept that came before the scheduler's word.
EARLY = 1024


class RequestResults:
    """The outputs of ended requests as the adapter sent them, and the ended requests that wait for theirs, by name."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Any]] = {}
        self._early: OrderedDict[str, tuple[RequestOutput | None, list[int]]] = OrderedDict()

    def take(self, encoded: bytes) -> tuple[str, list[Any]]:
        """Take the output of a request. Returns the request's name, and the choices that waited for the output."""
        generated = _generated.decode(encoded)
        self._early[generated.request] = output_of(generated), generated.tokens
        while len(self._early) > EARLY:
            self._early.popitem(last=False)
        return generated.request, self.waiting.pop(generated.request, [])

    def has(self, request: str) -> bool:
        """Whether the word on a request has come."""
        return request in self._early

    def output(self, request: str) -> RequestOutput | None:
        """The output of a request, if it has come."""
        return self._early.get(request, (None, []))[0]

    def tokens(self, request: str, choice: int) -> int | None:
        """How many tokens a choice has put out, if the word has come."""
        counts = self._early.get(request, (None, []))[1]
        return counts[choice] if choice < len(counts) else None

    def forget(self, request: str) -> None:
        """Nobody asks for the word on it any more."""
        self._early.pop(request, None)


def output_of(generated: Generated) -> RequestOutput | None:
    """vLLM's output, as it would have put it out at once; `None` where there is none."""
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
