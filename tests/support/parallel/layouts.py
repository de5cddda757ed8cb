"""Engines in several layouts, each on a Redis of its own, beside the shared engine of one rank."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import tracewire
from tests.support.engine_process import BLOB_THRESHOLD, EngineProcess, started_engine
from tracewire import Client
from tracewire_bus.transport.embedded import EmbeddedServer

__all__ = ["CAPACITY", "Served", "served"]

#: How many traces the engine of two ranks takes that tests share.
CAPACITY = 6


class Served:
    """An engine that serves, and the Redis that it serves."""

    def __init__(self, url: str, engine: EngineProcess) -> None:
        self.url, self.engine = url, engine

    def client(self) -> Client:
        """A client of it, to be entered."""
        return tracewire.connect(self.url)


@asynccontextmanager
async def served(
    folder: Path, *options: str, cores: str = "0|1", wait: bool = True, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Served]:
    """An engine with these options; `cores` are its workers', as vLLM has it. It is on its way, or serves."""
    variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, **(environment or {})}
    shared = ("--block-timeout", "3", "--blob-threshold", str(BLOB_THRESHOLD))
    async with EmbeddedServer.start() as server:
        with started_engine(
            server.url,
            folder,
            *shared,
            *options,
            environment=variables,
        ) as engine:
            if wait:
                engine.wait_ready()
            yield Served(server.url, engine)
