"""`tracewire audit` prints the trail, some of it, or the code that it names."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import anyio.to_thread
import pytest

from tracewire.cli import main as cli
from tracewire_bus.bus import Bus
from tracewire_bus.domain.approvals import Approvals
from tracewire_bus.store.audit import AuditEntry, AuditLog

HASH = "ab" * 32


async def test_the_command(
    bus: Bus, redis_url: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*arguments: str) -> list[str]:
        given = [*arguments, "--url", redis_url, "--prefix", prefix]
        status = await anyio.to_thread.run_sync(partial(cli.main, given))
        said = capsys.readouterr()
        return [str(status), *said.out.splitlines(), *said.err.splitlines()]

    assert "No such entry" in (await command("audit"))[-1]
    log = AuditLog(bus)
    await log.append([AuditEntry("submit", "t1", "accepted", 1.5, key="alice", tenant="red", code=[HASH])], 100)
    await log.append([AuditEntry("cancel", "t1", "refused", 2.5, tenant="blue", reason="so")], 100)
    status, first, second = await command("audit")
    assert status == "0"
    assert first.split("\t")[1:8] == ["accepted", "submit", "t1", "red", "alice", "", HASH[:12]]
    assert second.split("\t")[1:4] == ["refused", "cancel", "t1"]
    for option in (("--refused",), ("--kind", "cancel"), ("--tenant", "blue")):
        assert len(await command("audit", *option)) == 2, option
    for option in (("--key", "alice"), ("--name", "t1", "--kind", "submit")):
        assert [json.loads(line)["key"] for line in (await command("audit", "--json", *option))[1:]] == ["alice"]
    assert (await command("audit", "--code", HASH))[0] == "1"
    await log.keep_code(HASH, "block watch(model, tracer, live)\n    x = 1\n")
    assert await command("audit", "--code", HASH) == ["0", "block watch(model, tracer, live)", "    x = 1"]
    # What was refused can be approved by its hash.
    file = tmp_path / "approved.json"
    shown = await command("approve", HASH, "--to", str(file), "--yes")
    assert shown[:2] == ["0", HASH]
    assert "    x = 1" in shown
    assert [(one.name, one.hash) for one in Approvals(file).read()] == [("watch", HASH)]
    assert (await command("approve", "cd" * 32, "--to", str(file), "--yes"))[0] == "2"
