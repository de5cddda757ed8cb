"""A trial of each fault: the short form of `make faults`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import anyio
import pytest

from tests.faults.harness.faults import FAULTS, Fault
from tests.faults.harness.processes import RedisServer
from tests.faults.harness.trials import run, summary
from tests.support.network import Wire, wire
from tracewire_bus.bus import Bus


@pytest.mark.timeout(500)
async def test_nothing_is_lost_whatever_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fault, "traces", (8, 12))
    tallies = await run([*FAULTS], len(FAULTS), seed=11, lanes=3)
    said = summary(tallies)
    assert said["trials"] == len(FAULTS)
    assert said["violations"] == 0, [str(violation) for tally in tallies.values() for _, violation in tally.violations]
    done = sum((tally.done for tally in tallies.values()), start=next(iter(tallies.values())).done)
    # What was to break did.
    assert done["cuts"]
    assert done["engine lost"]
    assert done["slots moved"]
    assert said["by_fault"]["kill adapter"]["restarts"] + said["by_fault"]["engine dies"]["restarts"] > 0


@pytest.fixture
async def server(tmp_path: Path) -> RedisServer:
    """A server on a TCP port."""
    started = RedisServer(tmp_path)
    await started.start()
    yield started
    await started.aclose()


async def _said(bus: Bus, line: Wire) -> bool:
    with anyio.move_on_after(0.1) as scope:
        await bus.command("PING")
    return not scope.cancelled_caught


async def test_a_wire_holds_cuts_and_lets_go(server: RedisServer) -> None:
    async with wire(server.port, Random(1)) as line, Bus.open(line.url) as bus:
        assert await bus.command("SET", "key", "1") == b"OK"
        assert line.hold(True, False, new=True) >= 1
        assert not await _said(bus, line)
        line.let_go()
        assert await bus.command("GET", "key") == b"1"
        # Its answer goes nowhere, though Redis has it; and it is asked again.
        line.cut_next("down")
        assert await bus.command("EVAL", "return redis.call('INCR', KEYS[1])", 1, "key") == 3
        assert line.cut_through == 1
        line.cut_next("up")
        assert int(await bus.command("EVAL", "return redis.call('INCR', KEYS[1])", 1, "key")) >= 4
        assert line.cut_through == 2
        await line.cut()
        assert await bus.command("PING") == b"PONG"


async def test_a_server_that_was_killed_comes_back_with_its_log(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, appendonly="yes", appendfsync="always")
    await server.start()
    try:
        async with Bus.open(server.url) as bus:
            await bus.command("SET", "key", "1")
            server.kill()
            await server.start()
            assert await bus.command("GET", "key") == b"1"
    finally:
        await server.aclose()
