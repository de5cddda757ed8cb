"""`tracewire dead` lists, shows, resubmits and drops dead letters."""

from __future__ import annotations

import json
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
import pytest

from tests.support.bus_engine import BusEngine, engine_info, tiny
from tests.support.dead_letters import dead, given_up
from tests.support.scripted_engine import acts
from tracewire import Ablate, Client, Steer
from tracewire.cli import main as cli
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import schema_text

PATIENCE = 60


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
    assert await command("dead", "list", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["id"], first["trace_id"], first["reason"]) == (id_, trace, "each engine was lost")
    assert set(second) == {"id", "time", "model", "trace_id", "reason"}
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
        assert await command("dead", "resubmit", other, "--json") == 0
        again = json.loads(capsys.readouterr().out)
        assert again["id"] == other
        assert await client.subscribe(again["trace_id"]).result()
    await dead(client, bus, redis_url, prefix)
    (other,) = [letter.id async for letter in client.dead_letters.list()]
    assert await command("dead", "drop", other) == 0
    assert await command("dead", "drop", other) == 1
    assert "no dead letter" in capsys.readouterr().err
    assert await command("dead", "show", other) == 1
    assert await client.dead_letters.list() == []


async def test_arrays_and_references_to_arrays_are_shown_by_type_and_size(
    client: Client, bus: Bus, redis_url: str, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await bus.registry.register(engine_info(hidden_size=2048, schema=schema_text()), 600)
    vector = np.arange(2048, dtype=np.float32)
    wide = Ablate("model.layers.1.mlp", np.ones((2, 8)))
    trace = client.trace("tiny", "hello", interventions=[Steer("residual(1)", vector), wide])
    await trace.start()
    id_ = await given_up(bus, trace.id)
    await trace.aclose()
    arguments = ["dead", "show", id_, "--url", redis_url, "--prefix", prefix]
    assert await anyio.to_thread.run_sync(cli.main, arguments) == 0
    steer, ablate = json.loads(capsys.readouterr().out)["submission"]["interventions"]
    assert steer == {"do": "steer", "at": "residual(1)", "vector": "<float32 [2048]>"}
    assert ablate["direction"] == "<float64 [2, 8]>"
