"""Reports of steps on their way to the adapter, and the encoding of deltas in them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from tracewire_bus.wire.messages import Append
from tracewire_engine.link.shared_ring import InRing
from tracewire_engine.protocol.messages import Report, StepRecord
from tracewire_engine.worker.blocks.failures import failure_of

from .host_copy import HostArray, ToHost, encoded_late
from .requests import TracedRequest

__all__ = ["BEHIND", "NO_DELTAS", "PACE", "PendingReport", "encode_deltas", "encoder"]

logger = logging.getLogger("vllm.tracewire")

encoder = msgspec.msgpack.Encoder(enc_hook=encoded_late)

NO_DELTAS = msgspec.Raw(encoder.encode([]))


def _encoded(deltas: list[Any]) -> bytes:
    """A step's deltas as they go on the wire; waits for their arrays."""
    delta = deltas[0]
    if len(deltas) == 1 and type(delta) is Append and len(delta.items) == 1 and len(delta.path) == 1:
        item = delta.items[0]
        if type(item) is HostArray:
            # As the encoder would have it.
            return item.appended(delta.path[0])
    return encoder.encode(deltas)


def encode_deltas(record: StepRecord, deltas: list[Any], traced: TracedRequest | None) -> None:
    """Put a step's deltas into its record. What cannot be encoded ends its request, and nothing else."""
    try:
        record.deltas = msgspec.Raw(_encoded(deltas))
    except Exception as exception:
        logger.exception("could not encode what %s saved", record.request)
        if traced is not None:
            traced.failure = traced.failure or failure_of(exception, None, hint=" (while its saves were encoded)")
            traced.ended_at = record.index if traced.ended_at is None else traced.ended_at
            record.ended = record.ended or "error"


class PendingReport:
    """A step's report, and what must still be made of bytes that are on their way to the host."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.steps: list[tuple[StepRecord, list[Any], TracedRequest | None]] = []
        self.batch: ToHost | InRing | None = None
        #: The copy that was begun last.
        self.copy: ToHost | InRing | None = None

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for more in it than what was saved."""
        report = self.report
        return bool(report.finishes or report.applied) or any(step.ended for step in report.steps)

    def complete(self) -> Report:
        """The whole report, good until `release`; waits for its bytes."""
        for record, deltas, traced in self.steps:
            encode_deltas(record, deltas, traced)
        if self.batch is not None and self.report.batch is not None:
            self.batch.tell(self.report.batch)
        return self.report

    def release(self) -> None:
        """It was sent."""
        if self.batch is not None:
            self.batch.release()


#: How many steps may wait for their bytes before the model waits for them.
BEHIND = 2

#: Steps that follow one another faster than this, in seconds, are reported two at a time where they come late anyhow.
PACE = 0.0025
