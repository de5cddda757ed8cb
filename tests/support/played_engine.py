"""An adapter in this process, over an engine that a test plays: how it takes their faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from tests.support.bus_engine import engine_info
from tests.support.fake_engine import FakeEngine
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Submission
from tracewire_engine.adapter.engine_api import Choice, Prepared
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.messages import Changes, FinishRecord, Report

__all__ = ["PlayedEngine", "adapted"]

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


class PlayedOutputs:
    """The outputs of one request, which a test puts out."""

    cached_tokens = 0
    prompt_logprobs: tuple[()] = ()

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[tuple[Choice, bool]](100)
        self.tokens = 0

    def put(self, text: str, finish_reason: str | None = None, count: int = 1) -> None:
        """A token, or with `count` 0 none."""
        choice = Choice(0, list(range(self.tokens, self.tokens + count)), text, finish_reason=finish_reason)
        self.tokens += count
        self._send.send_nowait((choice, finish_reason is not None))

    async def get(self) -> tuple[list[Choice], bool]:
        """As the seam has it."""
        choice, finished = await self._receive.receive()
        return [choice], finished

    def size(self) -> int:
        """As the seam has it."""
        return 0


class PlayedEngine(FakeEngine):
    """An engine without a model. What it was asked to do stands in `asked`."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, PlayedOutputs] = {}
        self.started = anyio.Event()
        self.asked: list[tuple[str, Any]] = []

    async def prepare(
        self,
        submission: Submission,
        index: int,
        block: bytes | None,
        declared: bytes | None,
        run: str,
        edits: bytes | None = None,
        shared: bytes | None = None,
        tenant: str | None = "",
    ) -> Prepared:
        """Everything is as good as anything."""
        return Prepared(prompt=None, prompt_tokens=1, params=None, choices=1, sampling={})

    async def start(self, request: str, prepared: Prepared, priority: int) -> PlayedOutputs:
        """A request begins."""
        outputs = self.requests[request] = PlayedOutputs()
        self.started.set()
        return outputs

    async def abort(self, request: str) -> None:
        """Its last output has no token."""
        self.asked.append(("abort", request))
        self.finish(request, "abort", 0)

    def finish(self, request: str, reason: str = "stop", count: int = 1) -> None:
        """End a request."""
        self.report(Report(finishes=[FinishRecord(request, 0, _NO_DELTAS)]))
        self.requests[request].put("x" * count, reason, count)

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        """Change live parameters."""
        self.asked.append(("steer", changes))

    async def pause(self, request: str) -> bool:
        """Hold."""
        self.asked.append(("pause", request))
        return True

    async def resume(self, request: str) -> bool:
        """Go on."""
        self.asked.append(("resume", request))
        return True

    async def pause_all(self) -> None:
        """Make no more tokens."""
        self.asked.append(("hold", ""))

    async def resume_all(self) -> None:
        """Make them again."""
        self.asked.append(("go on", ""))

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        """The text."""
        return "x" * len(token_ids)


@asynccontextmanager
async def adapted(url: str, prefix: str, engine: Any, **settings: Any) -> AsyncIterator[Adapter]:
    """An adapter of `engine` on the bus at `url`, stopped with the context."""
    async with Bus.open(url, prefix=prefix, patience_s=0.2) as bus:
        adapter = Adapter(engine, engine_info(), bus, Settings(**{"drain_s": 0, "heartbeat_s": 0.05, **settings}))
        async with anyio.create_task_group() as group:
            group.start_soon(adapter.run)
            try:
                yield adapter
            finally:
                adapter.stop()
