"""The entries of a model's queue, as every script replies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import Guard, integer

from .keys import Keys

__all__ = [
    "INLINE_BYTES",
    "PARTS",
    "REMEMBER_S",
    "TAKE_BYTES",
    "QueueFull",
    "Taken",
    "queue_names",
    "taken_entry",
    "to_bytes",
    "to_text",
]

#: How long a trace that was submitted is remembered, in seconds, so that it is not queued again and is known to exist.
REMEMBER_S: Final = 7 * 24 * 3600

#: What a take returns at most, in bytes of data, once it has an entry.
TAKE_BYTES: Final = 8 * 1024 * 1024

#: Larger data does not pass through Lua, which would copy it twice.
INLINE_BYTES: Final = 64 * 1024

PARTS: Final = ("entries", "data", "taken", "state", "turns", "bell", "leases", "client:", "lease:", "suspects")


class QueueFull(BusError):
    """The queue takes no more of this client's submissions now.

    Attributes:
        waiting: how many wait.
        limit: how many may.
        retry_after_s: seconds until there is room again, if entries go on being taken as they were of late.
    """

    def __init__(self, model: str, waiting: int, limit: int, retry_after_s: float) -> None:
        self.waiting = waiting
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(f"{waiting} submissions wait for {model!r}, the limit is {limit}")


@dataclass(frozen=True, slots=True)
class Taken:
    """An entry as it was queued. It may be anything: whoever took it decodes it.

    Its fields are `v` (the submission's schema), `t` (its trace's id) and `d` (the encoded submission). `trace` is the
    id as text, in which bytes that are not UTF-8 are surrogates. `queued_at` is when it was queued, in seconds since
    the epoch by Redis's clock. `attempt` counts how often it was taken, this time included; `tries` is how many engines
    may be lost over it, `lost` how many were, `why` what became of the last one that had it.
    """

    trace: str
    fields: dict[bytes, bytes]
    queued_at: float
    attempt: int = 1
    tries: int = 1
    lost: int = 0
    why: str = ""


@lru_cache(maxsize=256)
def queue_names(keys: Keys, model: str) -> tuple[str, ...]:
    """What every script is given first."""
    return tuple(keys.queue(model, part) for part in PARTS)


def taken_entry(guard: Guard, key: str, reply: Sequence[Any]) -> Taken:
    """An entry as a script replies it: trace, schema, micros, data or nothing, attempt, tries, lost, reason."""
    trace, schema, micros, data, attempt, tries, lost, why = reply
    fields = {b"v": schema, b"t": trace} | ({} if data is None else {b"d": data})
    # An entry that does not say when it was queued is one all the same.
    queued = guard.read(integer, micros, key=key, entry=trace) or 0
    return Taken(to_text(trace), fields, queued / 1e6, attempt, tries, lost, why.decode("utf-8", "replace"))


def to_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
