"""What an engine refuses at its start, with the reason."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from tests.support.adapter_command import adapter_command
from tests.support.checkpoints import make_checkpoint
from tests.support.engine_process import ENVIRONMENT
from tracewire_bus.transport.embedded import EmbeddedServer


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
        (["--hf-tok", "abbreviated"], {}, "--hf-token"),
        (
            ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 2}'],
            {},
            "--speculative-config: method is 'suffix'; expected ngram, draft_model, eagle, eagle3, medusa or "
            "custom_class with --model-runner first",
        ),
        (["--pipeline-parallel-size", "3", "--async-scheduling"], {}, "--async-scheduling"),
        (
            ["--model-runner", "first"],
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            "VLLM_USE_V2_MODEL_RUNNER=1 contradicts --model-runner",
        ),
        ([], {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "vLLM's second runner needs Triton"),
        (["--model-runner", "second"], {"VLLM_USE_V2_MODEL_RUNNER": ""}, "--model-runner second"),
        (["--enable-dbo"], {}, "--enable-dbo"),
        ([], {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "VLLM_WORKER_MULTIPROC_METHOD=fork"),
    ],
)
def test_settings_that_would_be_wrong_are_refused_with_the_reason(
    tmp_path: Path, options: list[str], environment: dict[str, str], said: str
) -> None:
    done = adapter_command(tmp_path, "demo", "--url", "unix:///nowhere", *options, environment=environment)
    assert done.returncode == 2, done.stderr[-2000:]
    assert f"{said} is not supported" in done.stderr or said in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        # vLLM's kernels for a CPU take its recurrent layers in bfloat16 alone, which they say when a request comes.
        ("qwen3_next", ["--dtype", "float32"], "vLLM died at its first request"),
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
