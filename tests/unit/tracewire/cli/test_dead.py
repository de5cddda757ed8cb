"""`tracewire dead` lists, shows, resubmits and drops dead letters."""

from __future__ import annotations

import json
from functools import partial

import anyio
import anyio.to_thread
import pytest

from tests.support.bus_engine import BusEngine, tiny
from tests.support.dead_letters import dead
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus

PATIENCE = 30


async def test_the_command(
    client: Client, bus: Bus, redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*arguments: str) -> int:
        arguments = (*arguments, "--url", redis_url, "--prefix", prefix)
        return await anyio.to_thread.run_sync(partial(cli.main, list(arguments)))

    id_, trace = await dead(client, bus, redis_url, prefix, acts)
    other, _ = await dead(client, bus, redis_url, prefix)
    assert await command("dead", "list", "--model", "tiny") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [id_, other]
    assert lines[0][2:] == ["tiny", trace, "each engine was lost"]
    assert await command("dead", "list", "--model", "another") == 0
    assert capsys.readouterr().out == ""
    assert await command("dead", "show", id_) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["trace_id"], shown["submission"]["invokes"]) == (trace, [{"prompt": "hello"}])
    async with BusEngine.running(redis_url, prefix, tiny) as engine:
        assert await command("dead", "resubmit", id_) == 0
        said = capsys.readouterr().out.strip()
        with anyio.fail_after(PATIENCE):
            while not engine.taken:
                await anyio.lowlevel.checkpoint()
        assert said == f"{id_} resubmitted as trace {engine.taken[0].trace}"
    assert await command("dead", "drop", other) == 0
    assert await command("dead", "drop", other) == 1
    assert "no dead letter" in capsys.readouterr().err
    assert await command("dead", "show", other) == 1
    assert await client.dead_letters.list() == []
