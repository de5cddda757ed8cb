"""A real engine in the sandbox: it serves, and its blocks reach neither the network nor the machine's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tracewire
from tests.support.engine_process import running_engine
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_engine.launch.sandbox import SandboxError, sandbox


def missing() -> str:
    """Why no sandbox can be made here; `""` if one can."""
    if os.environ.get("NO_BUBBLEWRAP"):
        return "NO_BUBBLEWRAP is set: .ci/run could not install Debian's package bubblewrap"
    try:
        with sandbox():
            return ""
    except SandboxError as error:
        # No bubblewrap, or a kernel or a container that allows no user namespaces: the text says which.
        return str(error)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if why := missing():
        pytest.skip(why)


@tracewire.intervention
def escape(model, tracer, live, port, path):
    """What code in the model's process is refused."""
    import os
    import pathlib
    import socket

    found = [].save()
    for attempt in (
        lambda: socket.create_connection(("127.0.0.1", port), timeout=5),
        lambda: pathlib.Path(path).write_text("x"),
        lambda: [pid for pid in os.listdir("/proc") if pid.isdigit()],
    ):
        try:
            found.append(repr(attempt()))
        except OSError as error:
            found.append(type(error).__name__)
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(float(model.logits[-1].max()))


# Starts an engine of its own.
@pytest.mark.full
async def test_an_engine_serves_from_the_sandbox(starts_engine: None, tmp_path: Path) -> None:
    async with EmbeddedServer.start(port=0) as server:
        with running_engine(server.url, tmp_path, "--sandbox", "--code", "any") as engine:
            target = Path.home() / "tracewire-was-here"
            async with tracewire.connect(server.url) as client:
                model = await client.models.get("demo", timeout=60)
                block = escape(port=1, path=str(target))
                result = await client.trace(model, "def parse(text):", block, max_tokens=8).result()
                connected, written, processes = result.saves["found"]
                assert connected in ("ConnectionRefusedError", "OSError")
                assert written == "OSError"
                assert not target.exists()
                # Its own processes and bubblewrap's, and none of the machine's others.
                assert str(engine.process.pid) not in processes
                assert len(result.saves["kept"]) == 8
                probe = tracewire.Probe("hs", "residual(*)")
                again = await client.trace(model, "def parse(text):", interventions=[probe], max_tokens=4).result()
                assert len(again.token_ids) == 4
        log = engine.log.read_text()
    assert "the sandbox does not separate traces from each other" in log
