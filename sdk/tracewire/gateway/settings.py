"""The settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a gateway. All durations are in seconds.

    Attributes:
        url: URL of the Redis; None for the variable `TRACEWIRE_URL`.
        prefix: prefix of all keys on Redis.
        name: the gateway's name as a client of the bus.
        keys: file with the API keys; None for a gateway without keys.
        keys_age_s: how often the gateway looks whether the file has changed.
        signing_key: file of the key with which the gateway signs what it submits; None for the variable
            `TRACEWIRE_KEY`, and without that for a gateway that signs nothing.
        cors: origins that browsers may call from; none by default.
        lease_ttl_s: how long after the gateway's death the engines cancel its attached traces.
        patience_s: how long a request waits for Redis.
        read_interval_s: the least time between two reads of events from Redis. What a stream has by then leaves as one
            write. None: half a millisecond for each stream, 40 ms at most.
        accept_s: how long a stream waits for an engine before the gateway sends the status 200.
        keep_alive_s: how often a silent stream sends a comment.
        stall_s: how long a client may leave a stream unread before the gateway disconnects it.
        head_s: how long the head of a request may take, and a connection on which none has come.
        drain_s: how long requests may run on after the gateway was told to stop.
        body_bytes: limit on a request's body, for keys that name none.
        concurrency: limit on concurrent requests of one key, for keys that name none; 0 for no limit.
        inline_bytes: limit on the arrays of one answer that the gateway downloads to inline them.
        tracing: whether each request has an OpenTelemetry span, of the process's tracer provider.
    """

    url: str | None = None
    prefix: str = "tw"
    name: str | None = None
    keys: Path | None = None
    keys_age_s: float = 1.0
    signing_key: Path | None = None
    cors: tuple[str, ...] = ()
    lease_ttl_s: float = 10.0
    patience_s: float = 10.0
    read_interval_s: float | None = None
    accept_s: float = 10.0
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    head_s: float = 30.0
    drain_s: float = 30.0
    body_bytes: int = 32 * 1024 * 1024
    concurrency: int = 0
    inline_bytes: int = 64 * 1024 * 1024
    tracing: bool = False
