"""The OpenTelemetry span of a trace in its client's process.

A client makes such spans only where the caller's code has a current span. That code has imported OpenTelemetry, so the
client imports nothing of OpenTelemetry by itself, and costs nothing where no code uses it.
"""

from __future__ import annotations

import sys
from functools import cache
from time import monotonic
from typing import Any, Final

from tracewire_bus.domain.fold import Fold
from tracewire_bus.domain.span_attributes import (
    MESSAGE_CHARACTERS,
    end_attributes,
    failed,
    request_attributes,
    sampling_attributes,
    span_name,
)
from tracewire_bus.wire.messages import Submission

from .output import Accepted, Event, Output, Restarted
from .output import Final as FinalEvent

__all__ = ["ClientSpan", "client_span"]

#: The module that code with a current span has imported.
_API: Final = "opentelemetry.trace"


def client_span() -> ClientSpan | None:
    """The span of a trace that the caller makes now, below the caller's current span; `None` if there is none."""
    api = sys.modules.get(_API)
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    return ClientSpan()


@cache
def _tracer() -> Any:
    """A tracer of the process's provider, which can be set once."""
    from opentelemetry.trace import get_tracer

    return get_tracer("tracewire")


class ClientSpan:
    """The span of one trace: from its submission until its end was read, or until its handle is closed or forgotten."""

    def __init__(self) -> None:
        from opentelemetry.context import get_current

        self._parent = get_current()
        self._span: Any = None
        self._begun = 0.0
        #: Whether an output was read.
        self._answered = False

    def __del__(self) -> None:
        self.end()

    def begin(self, submission: Submission) -> dict[str, str]:
        """Start the span. Returns its W3C trace context, for the submission."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._begun, self._answered = monotonic(), False
        self._span = _tracer().start_span(
            span_name(submission),
            context=self._parent,
            kind=SpanKind.CLIENT,
            attributes={**request_attributes(submission), **sampling_attributes(submission.invokes[0].sampling)},
        )
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span, self._parent))
        return carrier

    def event(self, event: Event, fold: Fold) -> None:
        """Take an event that was read and folded. The final ends the span."""
        if self._span is None:
            return
        if isinstance(event, Output):
            if not self._answered:
                self._answered = True
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", monotonic() - self._begun)
        elif isinstance(event, Accepted):
            self._span.set_attribute("tracewire.engine", event.engine)
        elif isinstance(event, Restarted):
            self._span.add_event("tracewire.restarted", {"reason": event.reason, "tracewire.attempt": event.attempt})
        elif isinstance(event, FinalEvent):
            reasons = [one.finish_reason for _, one in sorted(fold.choices.items()) if one.finish_reason is not None]
            self._span.set_attributes({**end_attributes(event, reasons), "tracewire.attempt": fold.attempt})
            if (failure := failed(event)) is not None:
                self._set_error(failure.message)
            self.end()

    def fail(self, error: BaseException) -> None:
        """End the span, because the submission failed."""
        if self._span is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._set_error(str(error))
            self.end()

    def end(self) -> None:
        """End the span, if it has begun and not ended."""
        if self._span is not None:
            self._span.end()
            self._span = None

    def _set_error(self, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, message[:MESSAGE_CHARACTERS]))
