"""How an adapter behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracewire_bus.domain.limit_table import DEFAULTS, Limits
from tracewire_bus.store.blobs import THRESHOLD_BYTES
from tracewire_bus.wire.feature_kinds import Autoencoder

from .bulk_writer import BulkSettings
from .code_policy import CodePolicy
from .gate import Identity
from .pending import REPORT_S

if TYPE_CHECKING:
    from .trace_spans import TraceSpans

__all__ = ["Settings"]

_ANY, _NOBODY = CodePolicy(), Identity()


@dataclass(frozen=True)
class Settings:
    """How an adapter behaves. Times in seconds."""

    #: The adapter's number among those of its engine.
    adapter: int = 0
    heartbeat_s: float = 1.0
    lease_s: float = 5.0
    #: How long traces may go on after the adapter was told to stop.
    drain_s: float = 10.0
    #: How long one wait for submissions lasts, which is how soon a stop is noticed by an idle intake.
    poll_s: float = 0.5
    #: How long a stopping adapter waits for Redis to take the last events.
    last_words_s: float = 5.0
    #: Arrays of more bytes than this, read by declared interventions, go into blobs (0: none does).
    blob_threshold: int = THRESHOLD_BYTES
    #: The settings of the bulk store for large saves; `None`: all saves go to Redis.
    bulk: BulkSettings | None = None
    #: Makes the traces' OpenTelemetry spans; `None`: the adapter makes none.
    spans: TraceSpans | None = None
    #: About how many events, and how many bytes of them as they were encoded, a trace's stream keeps (0: any number).
    retain_events: int = 0
    retain_bytes: int = 0
    #: How many finished traces are kept, and how many bytes of Redis they may take, in all (0: any number).
    retain_traces: int = 0
    retain_total_bytes: int = 0
    #: How many bytes of events may wait for Redis before the adapter pauses the engine.
    buffer_bytes: int = 256 * 1024 * 1024
    #: How long a trace waits for a Redis whose memory is full before it fails.
    memory_patience_s: float = 60.0
    #: How long the engine may take to report a step, or to answer a call, before it counts as lost.
    engine_patience_s: float = REPORT_S
    #: Whose blocks run.
    code: CodePolicy = _ANY
    #: What a submission and a trace may be and take.
    limits: Limits = DEFAULTS
    #: Whose signatures the adapter accepts, and its own.
    identity: Identity = _NOBODY
    #: The engine's own sparse autoencoders, by name.
    saes: Mapping[str, Autoencoder] = field(default_factory=dict)
    #: How many entries the audit trail keeps (0: the adapter writes none).
    audit: int = 0
