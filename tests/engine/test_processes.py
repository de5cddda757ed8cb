"""An engine's processes: what it refuses at start, and what is left of it when it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest

import tracewire
from tests.engine import blocks_for_tests as blocks
from tests.engine_process import ENVIRONMENT, EngineProcess, running_engine
from tests.nnsight.checkpoints import make_checkpoint
from tracewire_bus.embedded import EmbeddedServer
from tracewire_bus.streams import Bus


@pytest.fixture(scope="module")
async def own_bus() -> AsyncIterator[str]:
    """A Redis of these tests' own."""
    async with EmbeddedServer.start() as server:
        yield server.url


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--data-parallel-size", "2"], {}, "--data-parallel-size"),
        (["--stream-interval", "4"], {}, "--stream-interval"),
        (["--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"], {}, "--scheduler-cls"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], {}, "--speculative-config"),
        (["--pipeline-parallel-size", "3", "--async-scheduling"], {}, "--async-scheduling"),
        ([], {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_settings_that_would_be_wrong_are_refused_with_the_reason(
    options: list[str], environment: dict[str, str], said: str
) -> None:
    command = [sys.executable, "-m", "tracewire.cli", "engine", "demo", "--url", "unix:///nowhere", *options]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"{said} is not supported" in done.stderr or said in done.stderr.splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        # vLLM's kernels for a CPU take its recurrent layers in bfloat16 alone, which they say when a request comes.
        ("qwen3_next", ["--dtype", "float32"], "vLLM died of its first request"),
        ("gpt2", ["--first-answer", "0.000001"], "vLLM did not answer its first request within 1e-06 s"),
    ],
)
async def test_an_engine_that_gives_no_answer_does_not_serve(
    own_bus: str, tmp_path: Path, kind: str, options: list[str], said: str
) -> None:
    path = make_checkpoint(kind, tmp_path)
    command = [sys.executable, "-m", "tracewire.cli", "engine", str(path), "--url", own_bus, "--max-model-len", "256"]
    options = ["--kv-cache-memory-bytes", str(64 << 20), *options]
    done = await anyio.run_process([*command, *options], env={**os.environ, **ENVIRONMENT}, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert said in done.stderr.decode()
    assert b"ready" not in done.stdout


async def submit_long(client: tracewire.Client) -> tracewire.Trace:
    """A trace that runs for long, started and under way."""
    model = await client.model("demo", wait_for_engine=30)
    trace = client.trace(
        model,
        "import os\n",
        blocks.two_names,
        max_tokens=2000,
        ignore_eos=True,
        detach=True,
        on_engine_loss="fail",
    )
    await trace.start()
    seen = 0
    async for item in trace:
        seen += isinstance(item, tracewire.Output)
        if seen == 3:
            break
    return trace


async def test_sigterm_fails_what_runs_says_so_and_leaves_nothing(own_bus: str, tmp_path: Path) -> None:
    with running_engine(own_bus, tmp_path, "--drain", "0.1") as engine:
        async with tracewire.connect(own_bus) as client:
            trace = await submit_long(client)
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(tracewire.TraceFailed, match="shut down"):
                await trace.result()
            await trace.aclose()
            status = await anyio.to_thread.run_sync(engine.process.wait)
            assert status == 0, engine.log.read_text()[-2000:]
            assert await client.models() == []


async def test_sigkill_of_the_adapter_leaves_no_process(own_bus: str, tmp_path: Path) -> None:
    engine = EngineProcess(own_bus, tmp_path)
    try:
        await anyio.to_thread.run_sync(engine.wait_ready)
        below = engine.descendants()
        assert any("EngineCore" in " ".join(process.cmdline()) for process in below)
        async with tracewire.connect(own_bus) as client:
            trace = await submit_long(client)
            engine.process.kill()
            _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(below, timeout=30))
            assert not alive
            await trace.aclose()
            async with Bus.open(own_bus) as bus:
                # No lie on the stream: nobody said that the trace had ended.
                last = await bus.tail_id(trace.id)
            assert last is not None
            assert last.startswith("1-")
    finally:
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()
