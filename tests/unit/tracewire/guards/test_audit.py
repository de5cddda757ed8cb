"""The audit of a guard: a line for each decision, in its file and on the bus."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tracewire import Alarm
from tracewire.errors import InvalidRules
from tracewire.guards.audit import AuditLine, GuardAudit, check_audit
from tracewire_bus.bus import Bus
from tracewire_bus.store.audit import AuditLog
from tracewire_bus.transport.errors import BusUnavailable, NotAllowed


def line(**more: object) -> AuditLine:
    alarm = Alarm(trace_id="t", model="m", rule="r", save="s", token=3, value=2.0)
    return AuditLine(time=1.0, group="g", guard="me", alarm=alarm, outcome="done", **more)  # type: ignore[arg-type]


async def test_lines_are_appended(bus: Bus, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        audit = GuardAudit(str(path), bus)
        await audit.write(line(do="steer", live={"alpha": 1.0, "vector": np.ones(2)}, reason="so"))
        audit.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(one["do"], one["alarm"]["token"], one["live"]["alpha"]) for one in lines] == [("steer", 3, 1.0)] * 2
    entries = [entry async for entry in AuditLog(bus).read()]
    assert {(entry.kind, entry.name, entry.by, entry.model) for entry in entries} == {("guard", "t", "me", "m")}
    assert entries[0].reason == "r at token 3 (s = 2): done steer: so"


async def test_a_bus_that_refuses_is_asked_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def refuse(self: AuditLog, entries: object, most: int) -> None:
        asked.append("refused")
        raise (BusUnavailable if len(asked) == 1 else NotAllowed)("no")

    monkeypatch.setattr(AuditLog, "append", refuse)
    audit = GuardAudit("", bus)
    for _ in range(4):
        await audit.write(line())
    # The first was away, the second may not.
    assert len(asked) == 2
    audit.close()


async def test_a_file_that_cannot_be_written_is_named(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, says in (
        (str(tmp_path / "none" / "a.jsonl"), "No such file or directory"),
        (str(tmp_path / "file" / "a.jsonl"), "Not a directory"),
        (str(tmp_path), "Is a directory"),
        ("a\0b", "null"),
    ):
        for refuse in (check_audit, lambda path: GuardAudit(path, bus)):
            with pytest.raises(InvalidRules, match=f"audit: .*{says}"):
                refuse(path)
    for path in ("", str(tmp_path / "file"), str(tmp_path / "new")):
        check_audit(path)
    assert not (tmp_path / "new").exists()


def test_a_file_that_this_user_may_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidRules, match="Permission denied"):
        check_audit(str(tmp_path / "new"))


class FullDisk:
    """A file on a disk that has room for so many bytes."""

    name = "audit.jsonl"

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def write(self, data: bytes) -> int:
        taken = data[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        self.data += taken
        return len(taken)

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_full_disk_is_logged_once_and_ends_no_guard(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    """What it took of a line stays by itself; the lines after it are whole, and the bus has all decisions."""
    audit, disk = GuardAudit("", bus), FullDisk(10)
    audit._file = disk  # type: ignore[assignment]
    for number in range(3):
        await audit.write(line(reason=f"lost {number}"))
        # Next it takes the end of the line and no more.
        disk.room = 1 if number == 0 else 0
    disk.room = 100_000
    for number in range(2):
        await audit.write(line(reason=f"kept {number}"))
    disk.room = 0
    await audit.write(line(reason="lost again"))
    audit.close()
    part, *lines = disk.data.splitlines()
    assert len(part) == 10
    assert [json.loads(text)["reason"] for text in lines] == ["kept 0", "kept 1"]
    assert b"\n\n" not in disk.data
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said == ["the guard's audit audit.jsonl lacks decisions from now on: No space left on device"] * 2
    assert len([entry async for entry in AuditLog(bus).read()]) == 6
