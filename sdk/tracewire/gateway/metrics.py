"""The gateway's metrics for Prometheus: docs/gateway.md lists their names."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tracewire import BusRefused, Client

from .token_metrics import TokenMetrics

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STEER_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one gateway, in a registry of its own."""

    # whole: a table of metrics
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "tracewire_gateway_requests_total",
            "Requests that were answered, by route and status.",
            ("method", "route", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "tracewire_gateway_request_seconds",
            "Seconds from a request to the end of its answer, streams included.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = Gauge(
            "tracewire_gateway_running_requests", "Requests that run now, streams included.", registry=registry
        )
        self.first_output_seconds = Histogram(
            "tracewire_gateway_first_output_seconds",
            "Seconds from a request under /v1 to the first output of its trace.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.by_token = TokenMetrics()
        registry.register(self.by_token)
        self.restarts = Counter(
            "tracewire_gateway_restarts_total",
            "Further attempts of traces under /v1, whose engines were lost.",
            ("model",),
            registry=registry,
        )
        self.lags = Counter(
            "tracewire_gateway_lags_total",
            "Times that an engine slowed a trace under /v1 while Redis was late, by what the engine did.",
            ("model", "action"),
            registry=registry,
        )
        self.steer_seconds = Histogram(
            "tracewire_gateway_steer_seconds",
            "Seconds from a change of a trace under /v1, by this gateway, to the event with its first token.",
            ("model",),
            buckets=_STEER_SECONDS,
            registry=registry,
        )
        self.steers = Counter(
            "tracewire_gateway_steers_total", "Changes of live parameters, by outcome.", ("outcome",), registry=registry
        )

        self.engines = Gauge("tracewire_engines", "Running engines, by state.", ("model", "state"), registry=registry)
        self.engine_running = Gauge(
            "tracewire_engine_running_traces", "Traces that an engine runs.", ("model", "engine"), registry=registry
        )
        self.engine_capacity = Gauge(
            "tracewire_engine_capacity", "Traces that an engine runs at most.", ("model", "engine"), registry=registry
        )
        self.engine_waiting = Gauge(
            "tracewire_engine_waiting_bytes",
            "Bytes of events and saves that an engine has made and Redis has not taken.",
            ("model", "engine"),
            registry=registry,
        )
        self.edit_failures = Gauge(
            "tracewire_edit_failures",
            "Requests on which a standing intervention raised, since the engine's start.",
            ("model", "engine", "edit"),
            registry=registry,
        )
        self.limits_reached = Gauge(
            "tracewire_engine_limits_reached",
            "Times that a submission or a trace has reached a limit of an engine, since the engine's start.",
            ("model", "engine", "limit"),
            registry=registry,
        )
        self.redis_used = Gauge("tracewire_redis_used_bytes", "Memory that Redis uses.", registry=registry)
        self.redis_limit = Gauge(
            "tracewire_redis_limit_bytes", "Limit on the memory of Redis, 0 for none.", registry=registry
        )
        self.waiting = Gauge(
            "tracewire_queue_waiting", "Submissions that wait for a model.", ("model",), registry=registry
        )
        self.oldest = Gauge(
            "tracewire_queue_oldest_seconds",
            "Seconds that the longest-waiting of the clients' next submissions has waited.",
            ("model",),
            registry=registry,
        )
        self.dead_letters = Gauge("tracewire_dead_letters", "Dead letters on the bus.", registry=registry)

    async def read_bus(self, client: Client) -> None:
        """Set the metrics of the bus: its engines and queues.

        Raises:
            TracewireError: the bus does not answer.
        """
        engines = await client.engines.list()
        waiting = {model: await client.models.waiting(model) for model in {engine.model for engine in engines}}
        oldest = {model: await client.models.oldest(model) for model in waiting}
        with suppress(BusRefused):
            # Redis shows dead letters to operators only (deploy/redis/users.acl).
            self.dead_letters.set(await client.dead_letters.count())
        with suppress(BusRefused):
            memory = await client.engines.redis_memory()
            self.redis_used.set(memory.used)
            self.redis_limit.set(memory.limit)
        of_engines = (self.engines, self.engine_running, self.engine_capacity, self.engine_waiting, self.edit_failures)
        for gauge in (*of_engines, self.limits_reached, self.waiting, self.oldest):
            # An engine that has left is no longer told of.
            gauge.clear()
        for engine in engines:
            self.engines.labels(engine.model, engine.state).inc()
            self.engine_running.labels(engine.model, engine.name).set(engine.running)
            self.engine_capacity.labels(engine.model, engine.name).set(engine.capacity)
            self.engine_waiting.labels(engine.model, engine.name).set(engine.waiting_bytes)
            for edit, count in engine.edit_failures.items():
                self.edit_failures.labels(engine.model, engine.name, edit).set(count)
            for limit, count in engine.limits_reached.items():
                self.limits_reached.labels(engine.model, engine.name, limit).set(count)
        for model, count in waiting.items():
            self.waiting.labels(model).set(count)
            self.oldest.labels(model).set(oldest[model])

    def text(self) -> bytes:
        """The metrics in Prometheus's text form."""
        return generate_latest(self.registry)
