"""What a guard has decided, line by line: in a file, and in the audit trail of the bus if the guard may write there."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tracewire.errors import InvalidRules
from tracewire_bus.bus import BusError
from tracewire_bus.store.audit import MOST, AuditEntry, AuditLog
from tracewire_bus.transport.errors import NotAllowed

from .alarm import Alarm

if TYPE_CHECKING:
    from tracewire_bus.bus import Bus

__all__ = ["AuditLine", "GuardAudit", "check_audit"]

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


def check_audit(path: str) -> None:
    """Check that a guard can append to this file, or make it. Makes none. `""` stands for no file.

    Raises:
        InvalidRules: it cannot.
    """
    if not path:
        return
    try:
        try:
            is_folder, written = stat.S_ISDIR(os.stat(path).st_mode), path
        except FileNotFoundError:
            is_folder, written = False, os.path.dirname(path) or "."
            os.stat(written)
        if is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(written, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: str, error: OSError | ValueError) -> InvalidRules:
    return InvalidRules("", "audit", f"{path!r}: {getattr(error, 'strerror', None) or error}")


class GuardAudit:
    """Writes the lines. `path` is the file's, or `""`.

    Raises:
        InvalidRules: the file cannot be opened.
    """

    def __init__(self, path: str, bus: Bus) -> None:
        try:
            self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from error
        #: Whether the file took the last line not or not whole; whether the file ends with a part of a line.
        self._failing = self._torn = False
        self._log: AuditLog | None = AuditLog(bus)

    async def write(self, line: AuditLine) -> None:
        """Write a line. A file or a bus that does not take it is no error."""
        alarm = line.alarm
        logger.info(
            "guard: trace %s, rule %s, token %d, %s = %g: %s %s %s",
            *(alarm.trace_id, alarm.rule, alarm.token, alarm.save, alarm.value, line.outcome, line.do, line.reason),
        )
        self._append(_encode(line) + b"\n")
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

    def _append(self, data: bytes) -> None:
        """Append a line to the file. A part of a line that a full disk has taken stays on a line by itself."""
        if self._file is None:
            return
        data = b"\n" + data if self._torn else data
        try:
            while data:
                written = self._file.write(data)
                self._torn = data[written - 1 : written] != b"\n"
                data = data[written:]
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.error("the guard's audit %s lacks decisions from now on: %s", self._file.name, error.strerror)
            self._failing = True

    def close(self) -> None:
        """Close the file. One that fails is closed, too."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
