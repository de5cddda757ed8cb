"""What the process of each adapter does: its settings by the command's options, its memory, its bus and its spans."""

from __future__ import annotations

import argparse
import logging
from contextlib import AsyncExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import anyio

from tracewire_bus.domain.limit_table import parse_limits
from tracewire_bus.transport.errors import BusUnavailable

from .code_options import audit_entries, code_policy, identity_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from tracewire_bus.bus import Bus
    from tracewire_bus.wire.messages import EngineInfo
    from tracewire_engine.adapter.bulk_writer import BulkSettings
    from tracewire_engine.adapter.settings import Settings
    from tracewire_engine.adapter.trace_spans import TraceSpans

__all__ = [
    "LOOP",
    "adapter_settings",
    "bulk_settings",
    "check_bulk",
    "exporter_of",
    "open_bus",
    "spans_of",
]

logger = logging.getLogger("tracewire")

#: How often a loaded engine tries to reach a Redis that does not answer, in seconds.
_REDIS_S = 1.0

#: anyio's options for the adapter's event loop: uvloop if it is installed, which vLLM's server requires.
LOOP = {"use_uvloop": find_spec("uvloop") is not None}


def spans_of(options: argparse.Namespace, info: EngineInfo, held: AsyncExitStack) -> TraceSpans | None:
    """Makes the traces' OpenTelemetry spans, and exports them until `held` is closed; `None` without `--tracing`."""
    if not options.tracing:
        return None
    from tracewire_bus.span_export import SCOPE, exporting
    from tracewire_engine.adapter.trace_spans import TraceSpans

    provider = held.enter_context(exporting(options.exporter, "tracewire-engine", info.engine, info.versions.tracewire))
    return TraceSpans(provider.get_tracer(SCOPE, info.versions.tracewire))


def adapter_settings(options: argparse.Namespace, number: int, count: int, spans: TraceSpans | None) -> Settings:
    """The settings of one of the `count` adapters of an engine."""
    from tracewire_engine.adapter.settings import Settings

    return Settings(
        adapter=number,
        spans=spans,
        drain_s=options.drain,
        blob_threshold=options.blob_threshold,
        bulk=bulk_settings(options, number, count),
        buffer_bytes=max(1, options.buffer_bytes // count),
        memory_patience_s=options.memory_patience,
        retain_events=options.retain_events,
        retain_bytes=options.retain_bytes,
        retain_traces=options.retain_traces,
        retain_total_bytes=options.retain_total_bytes,
        engine_patience_s=options.engine_patience,
        limits=parse_limits(options.limit),
        code=code_policy(options),
        identity=identity_of(options),
        audit=audit_entries(options),
        saes=options.autoencoders,
    )


def bulk_settings(options: argparse.Namespace, number: int = 0, count: int = 1) -> BulkSettings | None:
    """The settings of the bulk stores of an adapter by the options; `None` without such stores."""
    if options.bulk is None:
        return None
    from tracewire_engine.adapter.bulk_writer import BulkSettings

    most, listen, advertise = options.bulk_bytes // count, options.bulk_listen or "", options.bulk_advertise
    if listen:
        host, _, port = listen.rpartition(":")
        listen = f"{host}:{int(port) + number if int(port) else 0}"
    return BulkSettings(options.bulk.absolute(), options.bulk_threshold, most, listen, advertise, options.bulk_archive)


async def open_bus(bus: Bus, held: AsyncExitStack) -> bool:
    """Open the bus, and close it with `held`. If Redis does not answer, wait a moment.

    Returns:
        Whether the bus is open. If not, the caller tries again, since the model is loaded by then.

    Raises:
        BusError: this Redis cannot be used.
    """
    try:
        await held.enter_async_context(bus)
    except BusUnavailable as error:
        logger.warning("this engine cannot serve yet, and waits for Redis: %s", error)
        await anyio.sleep(_REDIS_S)
        return False
    try:
        await bus.memory.refuse_eviction()
    except BusUnavailable as error:
        logger.warning("%s", error)
    return True


def check_bulk(options: argparse.Namespace) -> None:
    """Check, before the model is loaded, that bulk can be kept where the options say.

    Raises:
        ValueError: it cannot be.
    """
    settings = bulk_settings(options)
    if settings is None:
        if options.bulk_listen or options.bulk_advertise or options.bulk_archive:
            raise ValueError("--bulk-listen, --bulk-advertise and --bulk-archive need --bulk")
        return
    if options.bulk_advertise and not options.bulk_listen:
        raise ValueError("--bulk-advertise needs --bulk-listen")
    if settings.listen.startswith(("0.0.0.0:", "[::]:")) and not settings.advertise:
        needs = "--bulk-advertise: the name or address at which other hosts reach this one"
        raise ValueError(f"--bulk-listen {settings.listen} needs {needs}")
    from tracewire_engine.adapter.bulk_writer import check_archive, check_folder

    check_folder(settings.folder)
    if settings.archive:
        check_archive(settings.archive)


def exporter_of(options: argparse.Namespace) -> SpanExporter | None:
    """The exporter of OpenTelemetry spans; `None` without `--tracing`. Made before vLLM changes the environment.

    Raises:
        ValueError: the extra `tracing` is not installed, or an environment variable of OpenTelemetry is malformed.
    """
    if not options.tracing:
        return None
    try:
        from tracewire_bus.span_export import otlp_exporter
    except ModuleNotFoundError as error:
        raise ValueError(f"--tracing needs {error.name}: pip install 'tracewire[tracing]'") from error
    return otlp_exporter()
