"""What a running engine's processes show of the secrets that its command was given."""

from __future__ import annotations

from pathlib import Path

import psutil

import tracewire
from tests.support import engine_process
from tests.support.engine_process import SECRET, EngineProcess


@tracewire.intervention
def look(model, tracer, live):
    """The environment, as code in the model's process finds it."""
    import os

    found = [dict(os.environ)].save()


async def test_no_process_of_an_engine_shows_its_secrets(engine: EngineProcess, engine_bus: str) -> None:
    """Neither in the process list nor in its environment: a block may read both, of all of them."""
    processes = [psutil.Process(engine.process.pid), *engine.descendants()]
    assert len(processes) >= 4
    for process in processes:
        for what in ("cmdline", "environ"):
            assert SECRET.encode() not in (Path("/proc") / str(process.pid) / what).read_bytes(), (process, what)
    async with tracewire.connect(engine_bus) as client:
        model = await client.models.get("demo", timeout=30)
        async with client.trace(model, "x", look, max_tokens=1) as trace:
            (found,) = (await trace.result()).saves["found"]
    # A host has no environment at all.
    assert found == {} if engine_process.blocks_run == "host" else "PATH" in found
    assert SECRET not in str(found)
