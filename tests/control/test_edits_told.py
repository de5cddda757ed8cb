"""What edits leave waits for a Redis that is away, up to a bound; nobody waits for that. The adapter's part."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest

from tests.support.bus_engine import engine_info
from tracewire_bus.bus import Bus
from tracewire_bus.domain.tree import ModuleTree
from tracewire_bus.store.edits import Edits
from tracewire_bus.transport.errors import BusError, BusUnavailable
from tracewire_bus.wire.messages import Block, Edit, Failure
from tracewire_engine.adapter import standing_edits as module
from tracewire_engine.adapter.engine_api import Rejection
from tracewire_engine.adapter.http_requests import EditedClient, PlainRequests, _asked
from tracewire_engine.adapter.report_router import ReportRouter
from tracewire_engine.adapter.standing_edits import StandingEdits
from tracewire_engine.protocol.messages import FinishRecord

_NO_DELTAS = msgspec.Raw(msgspec.msgpack.encode([]))


async def standing(bus: Bus, **more: Any) -> StandingEdits:
    """An adapter's edits: one, `a`."""
    info = engine_info("tiny", "e")
    await bus.edits.install("tiny", Edit(name="a", block=Block(name="f", source="pass"), **more))

    async def announce() -> None:
        pass

    async def accept(block: Block) -> None:
        pass

    made = StandingEdits(bus, info, ModuleTree(info), accept, announce)
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


async def test_what_is_told_waits_for_redis_and_is_told_in_order(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_MS", 1)
    edits = await standing(bus)
    chosen = edits.choose(None)
    whole, away = Edits.tell, 3

    async def tell(self: Edits, model: str, edit: str, record: bytes) -> None:
        nonlocal away
        if away:
            away -= 1
            raise BusUnavailable("away")
        if b"no 1" in record:
            raise BusError("refused")
        await whole(self, model, edit, record)

    monkeypatch.setattr(Edits, "tell", tell)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        for number in range(4):
            edits.count_end(chosen, raised(number), trace=f"t{number}")
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    # What Redis refuses is lost, alone.
    assert await told(bus, 3) == ["r0", "r2", "r3"]


async def test_what_redis_refuses_to_disable_holds_up_no_record(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it given up: as many failures more ask again."""
    monkeypatch.setattr(module, "_LOOK_MS", 1)
    edits = await standing(bus, max_failures=1)
    chosen = edits.choose(None)
    whole, refusals = Edits.disable, 1

    async def disable(self: Edits, *arguments: Any) -> bool:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise BusError("refused")
        return await whole(self, *arguments)

    monkeypatch.setattr(Edits, "disable", disable)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        with anyio.fail_after(30):
            edits.count_end(chosen, raised(0), trace="t0")
            await edits.flushed()
            assert await told(bus, 1) == ["r0"]
            assert not (await bus.edits.load("tiny")).edits[0].disabled
            edits.count_end(chosen, raised(1), trace="t1")
            await edits.flushed()
            assert (await bus.edits.load("tiny")).edits[0].disabled
        group.cancel_scope.cancel()


async def test_of_too_many_the_oldest_are_dropped(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITING_BYTES", 1000)
    edits = await standing(bus, max_failures=0)
    chosen = edits.choose(None)
    for number in range(100):
        edits.count_end(chosen, raised(number), trace="t")
    assert edits._waiting <= 1000
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    kept = await bus.command("XLEN", bus.keys.edit_saves("tiny", "a"))
    assert 2 <= kept < 100
    assert await told(bus, kept) == [f"r{number}" for number in range(100 - kept, 100)]


async def test_one_that_raised_too_often_in_a_row_is_disabled(bus: Bus) -> None:
    edits = await standing(bus, max_failures=3)
    chosen = edits.choose(None)
    async with anyio.create_task_group() as group:
        group.start_soon(edits.publish)
        for number, record in enumerate([raised, raised, went_well, raised, raised]):
            edits.count_end(chosen, record(number), trace="t")
        with anyio.fail_after(30):
            await edits.flushed()
        await edits.refresh()
        assert edits.choose(None).versions == chosen.versions
        edits.count_end(chosen, raised(5), trace="t")
        with anyio.fail_after(30):
            await edits.flushed()
        group.cancel_scope.cancel()
    await edits.refresh()
    assert not edits.choose(None)
    with pytest.raises(Rejection, match="it is disabled: it raised on 3 requests of engine e in a row"):
        edits.choose(["a"])


# --- requests of plain clients, before a played engine client of vLLM's -----------------------------------------------


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


async def test_a_plain_client_ends_its_own_requests_only(bus: Bus) -> None:
    """vLLM's server aborts whatever it is given the name of, and an engine's own names are short."""
    edits = await standing(bus, scope="asked")
    ended: list[int] = []
    plain = PlainRequests(bus, edits, ReportRouter(None, {}, 0), {}, "e", lambda: ended.append(plain.running))
    played = PlayedClient()
    client: Any = EditedClient(played, plain)
    params = SimpleNamespace(extra_args=None)
    outputs = [client.generate("hello", params, "t0"), client.generate("hello", params, "t0")]
    assert [(await anext(one)).request_id for one in outputs] == ["t0", "t0"]
    assert [name for kind, name in played.asked if kind == "generate"] == ["o0", "o1"]
    assert plain.running == 2
    await client.abort(["t1", "o0"])
    await client.abort("t0")
    for one in outputs:
        await one.aclose()
    await client.abort("t0")
    assert played.asked[2:] == [("abort", ["o0", "o1"]), ("over", "o0"), ("over", "o1")]
    assert ended == [1, 0]
    assert not plain.busy


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"nnsight_mediator": "gA=="}, "nnsight_mediator: this name is the engine's own"),
        ({"tracewire_block": "gA=="}, "tracewire_block: this name is the engine's own"),
        ({"tracewire_edits": 3}, "expected a list of names"),
        ({"tracewire_edits": ["b"]}, "no edit 'b' is installed"),
    ],
)
async def test_what_a_plain_client_may_not_bring(bus: Bus, extra: dict[str, Any], message: str) -> None:
    edits = await standing(bus)
    plain = PlainRequests(bus, edits, ReportRouter(None, {}, 0), {}, "e", lambda: None)
    params = SimpleNamespace(extra_args=extra)
    params.clone = lambda: SimpleNamespace(extra_args=extra)
    with pytest.raises(ValueError, match=message):
        EditedClient(PlayedClient(), plain).generate("hello", params, "cmpl-1")
    assert not plain.busy


@pytest.mark.parametrize("asked", [["calm", "b"], "calm,b", " calm , b,"])
def test_edits_are_asked_for_by_a_list_or_by_one_string(asked: Any) -> None:
    params = SimpleNamespace(extra_args={"tracewire_edits": asked, "other": 1})
    params.clone = lambda: SimpleNamespace(extra_args=params.extra_args)
    names, left = _asked(params)
    assert names == ["calm", "b"]
    assert left.extra_args == {"other": 1}
