"""A real engine with its adapter in this process, for tests that ask vLLM itself or act behind the adapter's back."""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import anyio

from tests.support import engine_process
from tests.support.engine_process import check_expected
from tests.support.runners import RUNNER
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

__all__ = ["counts", "engine_inside", "forgotten"]


@asynccontextmanager
async def engine_inside(*, model: Any = None, name: str = "demo", **options: Any) -> AsyncIterator[tuple[Any, str]]:
    """The engine, which notes in `started` the names of the requests that it is given, and its Redis's URL.

    `options` are vLLM's. Every trace's saves are also collected by nnsight's own collect and compared by digest, unless
    `check_collect=False` is among them, as it must be where nnsight cannot: on several stages.
    """
    check_expected()
    # Whatever vLLM sets besides is undone, too.
    with patch.dict(os.environ, VLLM_CPU_ATTN_SPLIT_KV="0", VLLM_NO_USAGE_STATS="1"):
        async with _engine(model, name, options) as started:
            yield started


@asynccontextmanager
async def _engine(model: Any, name: str, options: dict[str, Any]) -> AsyncIterator[tuple[Any, str]]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from tracewire_engine.adapter.service import Adapter, Settings
    from tracewire_engine.adapter.vllm_engine import VllmEngine
    from tracewire_engine.launch.cli import demo_model
    from tracewire_engine.launch.engine_builder import WorkerSettings, build_engine, describe
    from tracewire_engine.link.blob_receiver import BlobReceiver
    from tracewire_engine.link.step_link import LinkReceiver

    class Noting(VllmEngine):
        started: list[str]

        async def start(self, request: str, *rest: Any) -> Any:
            outputs = await super().start(request, *rest)
            self.started.append(request)
            return outputs

    options.setdefault("kv_cache_memory_bytes", 64 << 20)
    taps = options.pop("taps", ())
    settings = {"check_collect": True, "model_runner": os.environ.get(RUNNER) or "first"}
    settings |= {
        key: options.pop(key) for key in ("kept_bytes", "check_collect", "model_runner", "blocks") if key in options
    }
    if engine_process.blocks_run != "inline" and not options.keys() & {
        "tensor_parallel_size",
        "pipeline_parallel_size",
    }:
        settings = {"blocks": engine_process.blocks_run, **settings, "check_collect": False}
    arguments = AsyncEngineArgs(model=str(model or demo_model()), **options)
    with LinkReceiver() as link, BlobReceiver(link.address) as large:
        traced = build_engine(arguments, link.address, taps, WorkerSettings(**settings))
        engine = Noting(traced, link, large)
        engine.started = []
        try:
            async with EmbeddedServer.start() as server, Bus.open(server.url) as bus:
                adapter = Adapter(engine, describe(traced, name, 64), bus, Settings(drain_s=1))
                serving = asyncio.create_task(adapter.run())
                yield engine, server.url
                adapter.stop()
                await serving
        finally:
            traced.vllm_entrypoint.shutdown()
            traced.vllm_entrypoint = engine.llm = None


async def counts(engine: Any) -> dict[str, int]:
    """What is in the scheduler's queues and in the KV cache."""
    return await engine.llm.engine_core.call_utility_async("tracewire_counts")


async def forgotten(engine: Any) -> None:
    """Wait until the workers hold nothing any more, and all KV blocks are free."""
    for _ in range(500):
        there = await counts(engine)
        if not await engine.tracked() and not there["requests"]:
            assert there["free_blocks"] == there["blocks"]
            return
        await anyio.sleep(0.02)
    raise AssertionError(f"the engine still holds a request: {there}")
