"""What a guard has decided, line by line: in a file, and in the audit trail of the bus if the guard may write there."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tracewire_bus.bus import BusError
from tracewire_bus.store.audit import MOST, AuditEntry, AuditLog
from tracewire_bus.transport.errors import NotAllowed

from .alarm import Alarm

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus

__all__ = ["AuditLine", "GuardAudit"]

logger = logging.getLogger("tracewire")

_encode = msgspec.json.Encoder(enc_hook=repr).encode


class AuditLine(msgspec.Struct, kw_only=True):
    """One decision of a guard, as the audit file has it.

    Attributes:
        time: when the guard was done, in seconds since the epoch by the guard's clock.
        group, guard: the group of guards, and the guard's own name in it.
        alarm: the alarm.
        outcome: `done`; `dry run`; `over budget`; `no answer`, so that `on_timeout` was done; `late`, the trace had
            ended; `failed`, what was decided could not be done.
        do, live, reason: the decision.
        asked: whom the guard asked: `nobody`, `terminal`, `http`, `function`, `model` or `decide`.
        paused: whether the guard paused the trace.
        pause_seconds: from the token to the pause, by the engine's and the guard's clocks; None without a pause.
        seconds: from the alarm to the end of what was done.
    """

    time: float
    group: str
    guard: str
    alarm: Alarm
    outcome: Literal["done", "dry run", "over budget", "no answer", "late", "failed"]
    do: str = ""
    live: dict[str, Any] = {}
    reason: str = ""
    asked: str = "nobody"
    paused: bool = False
    pause_seconds: float | None = None
    seconds: float = 0.0


class GuardAudit:
    """Writes the lines. `path` is the file's, or `""`."""

    def __init__(self, path: str, bus: Bus) -> None:
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._log: AuditLog | None = AuditLog(bus)

    async def write(self, line: AuditLine) -> None:
        """Write a line. A bus that does not take it is no error."""
        alarm = line.alarm
        logger.info(
            "guard: trace %s, rule %s, token %d, %s = %g: %s %s %s",
            *(alarm.trace_id, alarm.rule, alarm.token, alarm.save, alarm.value, line.outcome, line.do, line.reason),
        )
        if self._file is not None:
            self._file.write(_encode(line) + b"\n")
        if self._log is None:
            return
        what = f"{alarm.rule} at token {alarm.token} ({alarm.save} = {alarm.value:g}): {line.outcome} {line.do}".strip()
        entry = AuditEntry("guard", alarm.trace_id, "accepted", time=time.time(), model=alarm.model, by=line.guard)
        entry.reason = f"{what}: {line.reason}"[:500] if line.reason else what
        try:
            await self._log.append([entry], MOST)
        except NotAllowed:
            logger.info("the guard may not write to the audit trail of the bus, and writes to its own file only")
            self._log = None
        except BusError as error:
            logger.warning("the audit trail of the bus lacks a decision about trace %s: %s", alarm.trace_id, error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
