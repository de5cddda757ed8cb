"""Standing interventions of an adapter, and what its workers would report of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec

from tests.support.bus_engine import engine_info
from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Key
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.wire.messages import Block, Edit, Failure
from tracewire_engine.adapter.placing import Placer
from tracewire_engine.adapter.standing_edits import StandingEdits
from tracewire_engine.protocol.messages import FinishRecord

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


async def standing(bus: Bus, **more: Any) -> StandingEdits:
    """An adapter's edits: one, `a`."""
    info = engine_info("tiny", "e")
    await bus.edits.install("tiny", Edit(name="a", block=Block(name="f", source="pass"), **more))

    async def announce() -> None:
        pass

    async def accept(block: Block, key: Key | None) -> str:
        return ""

    made = StandingEdits(bus, info, Placer(info, ModuleTree(info)), accept, announce)
    await made.refresh()
    return made


def raised(number: int) -> FinishRecord:
    failure = Failure(type="ValueError", message=f"no {number}")
    return FinishRecord(f"r{number}", 0, _NO_DELTAS, edit_errors={"a": failure})


def went_well(number: int) -> FinishRecord:
    return FinishRecord(f"r{number}", 0, _NO_DELTAS)


async def told(bus: Bus, count: int) -> list[str]:
    async with bus.edit_records("tiny", "a", "start") as records:
        return [(await anext(records))[1].request for _ in range(count)]


class PlayedClient:
    """Puts out one output of each request, then waits; says by which names it was asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self.asked.append(("generate", request_id))
        try:
            yield SimpleNamespace(request_id=request_id)
            await anyio.sleep_forever()
        finally:
            self.asked.append(("over", request_id))

    async def abort(self, names: Any) -> None:
        self.asked.append(("abort", names))
