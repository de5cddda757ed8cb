"""The process of an adapter beside adapter 0 of its engine (see `adapter_group.py`)."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection

import anyio
import msgspec

from tracewire_bus.domain.limit_table import parse_limits
from tracewire_bus.logs import configure_logging
from tracewire_bus.process_memory import settle_memory
from tracewire_bus.wire.messages import EngineInfo
from tracewire_engine.adapter.vllm_engine import VllmEngine
from tracewire_engine.link.blob_receiver import BlobReceiver
from tracewire_engine.link.step_link import LinkReceiver

from .adapter_group import DRAINING, SERVING, Beside, Loaded, Model, core_sockets, follow
from .adapter_process import LOOP, adapter_settings, exporter_of, open_bus, spans_of
from .parent_death import die_with_parent
from .quick_exit import leave_when_done
from .secret import others

__all__ = ["main"]

logger = logging.getLogger("tracewire")


def main(beside: Beside, pipe: Connection, parent: int) -> None:
    """Serve until adapter 0, which is the process `parent`, says to stop, or the engine is lost."""
    die_with_parent(parent)
    leave_when_done()
    # Adapter 0 gets the signals of the terminal and of the supervisor.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    options = beside.options
    configure_logging(options.log_format)
    # This process starts none that runs blocks.
    os.environ.update(others(options.secrets))
    options.exporter = exporter_of(options)
    from vllm.envs import enable_envs_cache
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    with (
        LinkReceiver(beside=beside.link, adapter=beside.number) as link,
        BlobReceiver(link.address) as blobs,
    ):
        taken, given = core_sockets(beside.link, beside.number)
        llm = AsyncLLM(
            vllm_config=beside.vllm_config,
            executor_class=Executor.get_class(beside.vllm_config),
            log_stats=False,
            client_addresses={"input_address": taken, "output_address": given},
            client_count=beside.count,
            client_index=beside.number,
        )
        try:
            enable_envs_cache()
            settle_memory()
            loaded: Loaded = pipe.recv()
            model = Model(llm, loaded.tokenizer, loaded.loras, loaded.taps)
            info = msgspec.msgpack.decode(loaded.info, type=EngineInfo)
            anyio.run(partial(_run, model, link, blobs, info, beside, pipe), backend_options=LOOP)
        finally:
            llm.shutdown()


async def _run(
    model: Model, link: LinkReceiver, blobs: BlobReceiver, info: EngineInfo, beside: Beside, pipe: Connection
) -> None:
    from tracewire_bus.bus import Bus
    from tracewire_engine.adapter.service import Adapter

    options = beside.options
    most = parse_limits(options.limit).prompt_tokens
    engine = VllmEngine(model, link, blobs, options.engine_patience, options.chats, most, beside.number)
    async with AsyncExitStack() as held:
        bus = Bus.open(options.url, prefix=options.prefix, retention_s=options.retention)
        while not await open_bus(bus, held):
            if engine.lost:
                return
        settings = adapter_settings(options, beside.number, beside.count, spans_of(options, info, held))
        engine.permit = settings.code.permit
        adapter = Adapter(engine, info, bus, settings)
        async with anyio.create_task_group() as group:
            group.start_soon(follow, adapter, pipe)
            group.start_soon(_tell, adapter.serving, pipe, SERVING)
            group.start_soon(_tell, adapter.draining, pipe, DRAINING)
            await adapter.run()
            group.cancel_scope.cancel()


async def _tell(event: anyio.Event, pipe: Connection, message: bytes) -> None:
    await event.wait()
    pipe.send_bytes(message)
