"""OpenTelemetry spans of the traces that an adapter takes: their wait in the queue, and each attempt to run them.

The spans stand below the span that the submission's context names. The adapter makes them of the events that it
publishes, so no token has a span of its own. Imported with `--tracing` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracewire_bus.bus import Taken
from tracewire_bus.domain.span_attributes import (
    MESSAGE_CHARACTERS,
    end_attributes,
    failed,
    request_attributes,
    sampling_attributes,
    span_name,
    w3c_context,
)
from tracewire_bus.wire.codec import decode_submission
from tracewire_bus.wire.messages import (
    Event,
    Failure,
    Lagging,
    Paused,
    RawOutput,
    RawSteered,
    Restarted,
    Resumed,
    Submission,
)
from tracewire_bus.wire.messages import Final as FinalEvent
from tracewire_bus.wire.signing import unwrap

from .trace_stream import RawAccepted

__all__ = ["AttemptSpan", "TraceSpans"]

#: A trace of more prompts has no span for each.
_MOST_PROMPTS: Final = 64
#: The encoded submission of a refused trace is decoded once more if it has at most so many bytes.
_LIGHT_BYTES: Final = 64 * 1024
_NS: Final = 1_000_000_000
_context = TraceContextTextMapPropagator()


def _by(event: Paused | Resumed) -> dict[str, Any]:
    return {"by": event.by}


#: The events of a trace that its span tells of, with their attributes.
_TOLD: Final[dict[type[Event], tuple[str, Callable[[Any], dict[str, Any]]]]] = {
    RawSteered: ("tracewire.steered", lambda event: {"version": event.version}),
    Paused: ("tracewire.paused", _by),
    Resumed: ("tracewire.resumed", _by),
    Lagging: ("tracewire.lagging", lambda event: {"action": event.action, "nbytes": event.nbytes}),
    Restarted: ("tracewire.restarted", lambda event: {"reason": event.reason}),
}


class TraceSpans:
    """Makes the spans of the traces that one engine takes, by a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, entry: Taken, submission: Submission, attempt: int, engine: str) -> AttemptSpan:
        """The span of an attempt, of an entry that `engine` took."""
        parent = _context.extract(w3c_context(submission.context), Context())
        taken_ns = int(entry.taken_at * _NS) or time.time_ns()
        # The queue's clock is Redis's, which may be ahead of this machine's.
        queued_ns = min(int(entry.queued_at * _NS), taken_ns) if entry.queued_at else taken_ns
        attributes = {**request_attributes(submission), "tracewire.attempt": attempt, "tracewire.engine": engine}
        if attempt == 1:
            attributes["tracewire.queue_seconds"] = (taken_ns - queued_ns) / _NS
            if get_current_span(parent).get_span_context().is_valid:
                waiting = {"tracewire.trace_id": submission.trace, "gen_ai.request.model": submission.model}
                queued = self._tracer.start_span(
                    f"queue {submission.model}", parent, attributes=waiting, start_time=queued_ns
                )
                queued.end(taken_ns)
        span = self._tracer.start_span(
            span_name(submission), parent, SpanKind.SERVER, attributes=attributes, start_time=taken_ns
        )
        return AttemptSpan(self._tracer, span, submission, taken_ns)

    def refuse(self, entry: Taken, failure: Failure, engine: str) -> None:
        """Make the spans of a trace that the engine refused as it was sent."""
        data = entry.fields.get(b"d", b"")
        with suppress(ValueError):
            if len(data) <= _LIGHT_BYTES:
                submission = decode_submission(unwrap(data)[1])
                span = self.begin(entry, submission, entry.attempt, engine)
                span.event(FinalEvent(attempt=entry.attempt, seq=0, status="rejected", error=failure))
                span.end()


class AttemptSpan:
    """The span of one attempt of a trace, until `end`. A trace of several prompts has a span for each below it.

    Attributes:
        context: the span's W3C trace context, for the spans below it.
        log_fields: the span's ids, for the lines that are logged about it.
        recording: whether the span is sampled. Otherwise it needs no events.
    """

    def __init__(self, tracer: Tracer, span: Span, submission: Submission, taken_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._taken_ns = taken_ns
        self._several = 1 < len(submission.invokes) <= _MOST_PROMPTS
        self._prompts: dict[int, _PromptSpan] = {}
        self._reasons: dict[tuple[int, int], str] = {}
        self._answered = False
        self._final: FinalEvent | None = None
        self.recording = span.is_recording()
        self.context: dict[str, str] = {}
        _context.inject(self.context, set_span_in_context(span, Context()))
        known = span.get_span_context()
        self.log_fields = {
            "otel_trace_id": format_trace_id(known.trace_id),
            "otel_span_id": format_span_id(known.span_id),
        }

    def event(self, event: Event) -> None:
        """Take an event that the attempt publishes, with every token: this must be cheap."""
        kind = type(event)
        if kind is RawOutput:
            self._output(event)  # type: ignore[arg-type]
        elif kind in _TOLD:
            name, attributes = _TOLD[kind]
            self._span.add_event(name, attributes(event))
        elif isinstance(event, RawAccepted):
            self._accepted(event)
        elif isinstance(event, FinalEvent):
            # The last one counts: Redis may have had no memory for the first.
            self._final = event

    def _accepted(self, event: RawAccepted) -> None:
        self._span.set_attributes(sampling_attributes(event.sampling[0]))
        self._span.add_event("tracewire.accepted")
        if not self._several:
            return
        below = set_span_in_context(self._span, Context())
        for invoke, tokens in enumerate(event.prompt_tokens):
            attributes = {"tracewire.invoke": invoke, "tracewire.input_tokens": tokens}
            choices = event.sampling[invoke].get("n") or 1
            self._prompts[invoke] = _PromptSpan(
                self._tracer.start_span("prompt", below, attributes=attributes), choices
            )

    def _output(self, event: RawOutput) -> None:
        if not self._answered and event.token_ids:
            self._answered = True
            now = time.time_ns()
            self._span.add_event("tracewire.first_token", timestamp=now)
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", (now - self._taken_ns) / _NS)
        if event.finish_reason is not None:
            self._reasons[event.invoke, event.choice] = event.finish_reason
        if self._several:
            self._prompts[event.invoke].output(event)

    def end(self, error_type: str = "") -> None:
        """End the span, as the final says; or with an error of this type, if the attempt had no final that counts."""
        for prompt in self._prompts.values():
            prompt.end()
        span = self._span
        if error_type:
            span.set_attribute("error.type", error_type)
            span.set_status(Status(StatusCode.ERROR))
        elif self._final is not None:
            reasons = [reason for _, reason in sorted(self._reasons.items())]
            span.set_attributes(end_attributes(self._final, reasons))
            if (failure := failed(self._final)) is not None:
                span.set_status(Status(StatusCode.ERROR, failure.message[:MESSAGE_CHARACTERS]))
        span.end()


class _PromptSpan:
    """The span of one prompt among several: from when vLLM has it until all its choices have ended."""

    def __init__(self, span: Span, choices: int) -> None:
        self._span = span
        self._left = choices
        self._tokens = 0
        self._reasons: dict[int, str] = {}

    def output(self, event: RawOutput) -> None:
        if not self._tokens and event.token_ids:
            self._span.add_event("tracewire.first_token")
        self._tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._reasons[event.choice] = event.finish_reason
            if len(self._reasons) == self._left:
                self.end()

    def end(self) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute("tracewire.output_tokens", self._tokens)
        if self._reasons:
            reasons = [reason for _, reason in sorted(self._reasons.items())]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        self._span.end()
