"""Entries of a model's queue, as the scripts of the queue reply them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import Guard, integer

from .keys import Keys

__all__ = [
    "INLINE_BYTES",
    "PARTS",
    "REMEMBER_S",
    "TAKE_BYTES",
    "QueueFull",
    "SubmissionRefused",
    "Taken",
    "queue_names",
    "taken_entry",
    "to_bytes",
    "to_text",
]

#: How long Redis remembers the id of a submitted trace, in seconds. A second submission of that id is not queued.
REMEMBER_S: Final = 7 * 24 * 3600

#: A take stops after the entry that brings its data to this size, in bytes.
TAKE_BYTES: Final = 8 * 1024 * 1024

#: Larger data, in bytes, does not pass through Lua, since Lua would copy it twice.
INLINE_BYTES: Final = 64 * 1024

#: The parts of a queue (see `Keys.queue`) whose keys every script of the queue takes first, in this order.
PARTS: Final = ("entries", "taken", "state", "turns", "bell", "leases", "client:", "lease:", "suspects")


class QueueFull(BusError):
    """The queue is full for this client.

    Attributes:
        waiting: number of entries that wait.
        limit: number of entries that may wait.
        retry_after_s: estimate, in seconds, of when the queue has room again, from the recent rate of takes.
    """

    def __init__(self, model: str, waiting: int, limit: int, retry_after_s: float) -> None:
        self.waiting = waiting
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(f"{waiting} submissions wait for {model!r}, the limit is {limit}")


class SubmissionRefused(BusError):
    """The queue does not take a submission, which exceeds a limit of the model's engines.

    Attributes:
        limit: the limit's name.
    """

    def __init__(self, limit: str, message: str) -> None:
        self.limit = limit
        super().__init__(f"{limit}: {message}")


class Taken(msgspec.Struct, frozen=True):
    """A queue entry that was taken, withdrawn or given up. Its data may be malformed: the caller decodes it.

    Attributes:
        trace: the trace's id. Bytes that are not UTF-8 are surrogates.
        fields: `v`, the submission's schema; `t`, the trace's id; `d`, the encoded submission, absent if it is large.
        queued_at: when the client queued it, in seconds since the epoch by Redis's clock.
        attempt: how often engines have taken it, this time included.
        tries: how many engines may be lost over it.
        lost: how many engines were lost over it.
        why: why it left the last engine that had it; `""` on the first attempt.
        taken_at: when it came from Redis, in seconds since the epoch by this machine's clock; 0 if that is not known.
    """

    trace: str
    fields: dict[bytes, bytes]
    queued_at: float
    attempt: int = 1
    tries: int = 1
    lost: int = 0
    why: str = ""
    taken_at: float = 0.0


@lru_cache(maxsize=256)
def queue_names(keys: Keys, model: str) -> tuple[str, ...]:
    """The keys that every script of a model's queue takes first, in the order of `PARTS`."""
    return tuple(keys.queue(model, part) for part in PARTS)


def taken_entry(guard: Guard, key: str, reply: Sequence[Any]) -> Taken:
    """Decode a script's reply: trace, schema, microseconds since the epoch, data or None, attempt, tries, lost, reason.

    `key` is the key to name if the time is malformed; the entry then has `queued_at` 0.
    """
    trace, schema, micros, data, attempt, tries, lost, why = reply
    fields = {b"v": schema, b"t": trace} | ({} if data is None else {b"d": data})
    queued = guard.read(integer, micros, key=key, entry=trace) or 0
    why = why.decode("utf-8", "replace")
    return Taken(to_text(trace), fields, queued / 1e6, attempt, tries, lost, why, time.time())


def to_text(raw: bytes) -> str:
    """Decode UTF-8; other bytes become surrogates, which `to_bytes` turns back."""
    return raw.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
