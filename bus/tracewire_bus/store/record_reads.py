"""What a bus reads of the records of traces, without changing them (`trace_records.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import GREATEST, Guard, integer
from tracewire_bus.transport.pool import Connections
from tracewire_bus.wire.codec import decode_event
from tracewire_bus.wire.ids import FINAL_ID, is_encodable
from tracewire_bus.wire.messages import Final as FinalEvent

from .keys import Keys

__all__ = ["RecordReads", "TraceMissing", "check_name", "deadline_ms", "text_of"]


class TraceMissing(BusError, LookupError):
    """No trace of this id was submitted, or its record has expired."""


class RecordReads:
    """A base of `Records`."""

    def __init__(self, connections: Connections, keys: Keys) -> None:
        self._connections = connections
        self._keys = keys
        self._guard: Guard = connections.guard

    async def existing(self, traces: Sequence[str]) -> set[str]:
        """Those of these traces that have a record or events, and have not expired.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if not traces:
            return set()
        keys = ((self._keys.record(trace), self._keys.events(trace)) for trace in traces)
        replies = await self._connections.commands(*(("EXISTS", *pair) for pair in keys))
        return {trace for trace, reply in zip(traces, replies, strict=True) if reply}

    async def overtaken(self, engine: str, attempts: Sequence[tuple[str, int]]) -> list[bool]:
        """For each trace and attempt that `engine` began, whether Redis refuses the attempt's events by now.

        Redis refuses them once the trace has ended, or another engine or a later attempt has begun.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        if not attempts:
            return []
        replies = await self._connections.commands(
            *(("HMGET", self._keys.record(trace), "a", "e") for trace, _ in attempts),
            *(("XRANGE", self._keys.events(trace), FINAL_ID, FINAL_ID) for trace, _ in attempts),
            unbatched=True,
        )
        known, finals = replies[: len(attempts)], replies[len(attempts) :]
        numbers = [
            number and self._guard.read(integer, number, key=self._keys.record(trace), entry="a")
            for (trace, _), (number, _) in zip(attempts, known, strict=True)
        ]
        return [
            bool(final) or (last or 0) > attempt or (last == attempt and text_of(by or b"") != engine)
            for (_, attempt), last, (_, by), final in zip(attempts, numbers, known, finals, strict=True)
        ]

    async def _final_entry(self, trace: str) -> Any:
        """A list with the entry of the trace's final event, empty if the trace has not ended."""
        if not is_encodable(trace):
            return []
        return await self._connections.command("XRANGE", self._keys.events(trace), FINAL_ID, FINAL_ID, unbatched=True)

    async def ended(self, trace: str) -> bool:
        """Whether the trace's final event is on its stream."""
        return bool(await self._final_entry(trace))

    async def failed_as(self, trace: str) -> str | None:
        """The type of the error that a trace ended with; None if it ended otherwise, still runs, or is malformed."""
        found = await self._final_entry(trace)
        if not found:
            return None
        fields = dict(zip(found[0][1][::2], found[0][1][1::2], strict=True))
        try:
            event = decode_event(fields.get(b"d", b""))
        except (ValueError, msgspec.MsgspecError):
            return None
        return event.error.type if isinstance(event, FinalEvent) and event.error is not None else None

    async def left(self, trace: str) -> tuple[bool, float | None]:
        """Whether the trace has a record, and the seconds until its deadline (None if it has no deadline)."""
        (model, due), (seconds, micros) = await self._connections.commands(
            ("HMGET", self._keys.record(trace), "m", "t"), ("TIME",)
        )
        now = int(seconds) + int(micros) / 1e6
        at = None if due is None else self._guard.read(deadline_ms, due, key=self._keys.record(trace), entry="t")
        return model is not None, None if at is None else at / 1000 - now

    async def holder(self, trace: str) -> tuple[str, str, int] | None:
        """The model of a trace, the engine that has begun it or `""`, and its last attempt; None without a record.

        Raises:
            BusUnavailable: Redis does not answer.
        """
        check_name(trace)
        key = self._keys.record(trace)
        model, engine, attempt = await self._connections.command("HMGET", key, "m", "e", "a")
        if model is None:
            return None
        return text_of(model), text_of(engine or b""), self._guard.read(integer, attempt or 0, key=key, entry="a") or 0

    async def is_left(self, trace: str) -> bool:
        """Whether the engine of a trace's last attempt has noted that it runs the trace no longer."""
        check_name(trace)
        return text_of(await self._connections.command("HGET", self._keys.record(trace), "s") or b"") == "waiting"

    async def submitter(self, trace: str) -> str:
        """The id of the key that a trace's record names as that of its submission; `""` if it names none."""
        check_name(trace)
        return text_of(await self._connections.command("HGET", self._keys.record(trace), "k") or b"")


def check_name(trace: str) -> None:
    """Raise `TraceMissing` for an id that no key can have."""
    if not is_encodable(trace):
        raise TraceMissing(f"no trace {trace!r}")


def deadline_ms(raw: bytes) -> int:
    """A deadline, in milliseconds since the epoch."""
    return integer(raw, -GREATEST)


def text_of(data: bytes | str | int) -> str:
    """The text of what Redis has answered, which nobody has checked."""
    if isinstance(data, int):
        return str(data)
    return data if isinstance(data, str) else data.decode("utf-8", "replace")
