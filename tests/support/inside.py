"""An engine and its adapter in one process, where vLLM itself can be asked what it holds; then nnsight's own engine.

Prints one JSON object.

    python -m tests.support.inside [--reference] [--many COUNT]
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")

import anyio

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.cancelled import cancelled_among_many
from tests.support.reference import by_nnsight, by_tracewire
from tracewire_bus.bus import Bus


async def run(model, link, blobs, info, options):
    """What was asked for, one after the other."""
    from tracewire_engine.adapter.service import Adapter
    from tracewire_engine.adapter.vllm_engine import VllmEngine

    engine, figures = VllmEngine(model, link, blobs), {}
    async with Bus.open("embedded://") as bus:
        adapter = Adapter(engine, info, bus)
        async with anyio.create_task_group() as group:
            group.start_soon(adapter.run)
            if options.reference:
                figures["reference"] = {"tracewire": await by_tracewire(bus.url), "tracked": await engine.tracked()}
            if options.many:
                figures["many"] = await cancelled_among_many(bus.url, engine, adapter, options.many)
            adapter.stop()
    return figures


def main():
    """Start the engine in this process."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from tracewire_engine.launch.cli import demo_model
    from tracewire_engine.launch.engine_builder import WorkerSettings, build_engine, describe
    from tracewire_engine.link.blob_receiver import BlobReceiver
    from tracewire_engine.link.step_link import LinkReceiver

    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--many", type=int, default=0)
    options = parser.parse_args()
    places = max(16, options.many)
    arguments = AsyncEngineArgs(
        model=str(demo_model()), kv_cache_memory_bytes=512 << 20, max_num_seqs=places, max_num_batched_tokens=8192
    )
    with LinkReceiver() as link, BlobReceiver(link.address) as blobs:
        # Low, so that some saves travel as references: their digests are the arrays'.
        model = build_engine(arguments, link.address, settings=WorkerSettings(blob_threshold=1024))
        try:
            figures = anyio.run(run, model, link, blobs, describe(model, "demo", places), options)
        finally:
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None
    if options.reference:
        from benchmarks.nnsight_cpu import CpuVLLM

        model = CpuVLLM(
            arguments.model, mode="async", dispatch=True, kv_cache_memory_bytes=arguments.kv_cache_memory_bytes
        )
        try:
            figures["reference"]["nnsight"] = anyio.run(by_nnsight, model)
        finally:
            model.vllm_entrypoint.shutdown()
            model.vllm_entrypoint = None
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
