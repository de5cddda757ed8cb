"""A client's view of standing interventions, beside scripted engines that follow them or do not; and the command."""

from __future__ import annotations

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest

import tracewire
from tests.support.blocks import edits as blocks
from tests.support.bus_engine import BusEngine, engine_info, tiny
from tracewire import Client, Edits, Probe
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import encode
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, Delta, EditRecord, Failure, Manifest, Set
from tracewire_bus.wire.packing import wire

#: An engine that follows whatever comes.
FOLLOWS = {"edits": 10**9}


PROBE = Probe("score", "residual(2)")


@pytest.fixture
def edits(client: Client) -> Edits:
    """Those of the scripted engine's model."""
    return client.edits("tiny")


async def test_it_waits_until_every_engine_follows(edits: Edits, redis_url: str, prefix: str) -> None:
    follows, behind = engine_info("tiny", "follows", **FOLLOWS), engine_info("tiny", "behind", edits=0)
    async with (
        BusEngine.running(redis_url, prefix, tiny, follows),
        BusEngine.running(redis_url, prefix, tiny, behind) as late,
        Bus.open(redis_url, prefix=prefix) as bus,
    ):
        with pytest.raises(tracewire.EditPending, match=r"after 0.2 s, not yet confirmed by behind") as pending:
            await edits.install("a", interventions=[PROBE], timeout=0.2)
        assert pending.value.engines == ["behind"]
        (standing,) = await edits.list()
        assert standing.engines == ("follows",)
        assert standing.problems == {"behind": "it has not followed the last change yet"}
        installed = []

        async def install() -> None:
            installed.append(await edits.install("a", interventions=[PROBE], timeout=60))

        async with anyio.create_task_group() as group:
            group.start_soon(install)
            while (await edits.get("a")).version == standing.version:
                await anyio.lowlevel.checkpoint()
            assert installed == []
            late.info.edits = 10**9
            await bus.registry.register(late.info, 600)
        assert sorted(installed[0].engines) == ["behind", "follows"]


async def test_what_an_engine_refuses_is_taken_back(edits: Edits, redis_url: str, prefix: str) -> None:
    info = engine_info("tiny", "picky", **FOLLOWS, edit_errors={"a": "block: not with me"})
    async with BusEngine.running(redis_url, prefix, tiny, info):
        with pytest.raises(tracewire.EditRejected, match="not with me") as refused:
            await edits.install("a", interventions=[PROBE])
        assert (refused.value.name, refused.value.field) == ("a", "block")
        assert await edits.list() == []
        # Where nobody asks the engines, it stands.
        first = await edits.install("a", interventions=[PROBE], timeout=0)
        assert first.problems == {"picky": "block: not with me"}
        with pytest.raises(tracewire.EditRejected):
            await edits.install("a", interventions=[Probe("other", "residual(1)")])
        (standing,) = await edits.list()
        assert [one.name for one in standing.interventions] == ["score"]


async def test_what_is_put_back_runs_before_the_caller_is_told_of_the_refusal(
    edits: Edits, redis_url: str, prefix: str
) -> None:
    """A trace that follows at once finds the earlier edit on the engine."""
    info, refused = engine_info("tiny", "picky", edits=0), list[BaseException]()
    async with (
        BusEngine.running(redis_url, prefix, tiny, info),
        Bus.open(redis_url, prefix=prefix) as bus,
        anyio.create_task_group() as group,
    ):
        first = (await edits.install("a", interventions=[PROBE], timeout=0)).version

        async def replace() -> None:
            with pytest.raises(tracewire.EditRejected, match="not with me") as error:
                await edits.install("a", interventions=[Probe("other", "residual(1)")], timeout=60)
            refused.append(error.value)

        async def version_after(version: int) -> int:
            while (found := (await edits.get("a")).version) == version:
                await anyio.lowlevel.checkpoint()
            return found

        group.start_soon(replace)
        info.edits = second = await version_after(first)
        info.edit_errors = {"a": "block: not with me"}
        await bus.registry.register(info, 600)
        third = await version_after(second)
        for _ in range(20):
            await edits.list()
        assert refused == []
        info.edits, info.edit_errors = third, {}
        await bus.registry.register(info, 600)
    assert len(refused) == 1


async def test_without_an_engine_one_installs_only_without_waiting(edits: Edits) -> None:
    with pytest.raises(tracewire.UnknownModel):
        await edits.install("a", interventions=[PROBE])
    assert await edits.list() == []
    standing = await edits.install("a", blocks.watch, scope="asked", timeout=0)
    assert (standing.block, standing.scope, standing.engines) == ("watch", "asked", ())
    assert standing.filename == blocks.__file__
    await edits.clear()
    assert await edits.list() == []


async def test_what_an_edit_left_is_folded_and_compared(edits: Edits, redis_url: str, prefix: str) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    steps: list[list[Delta]] = [
        [Set(path=("rows",), value=[wire(array)])],
        [Append(path=("rows",), items=[wire(array + 1)])],
    ]
    whole = [array, array + 1]

    def record(kept: bytes) -> bytes:
        manifest = Manifest(invoke=0, choice=0, name="rows", kind="list", length=2, digest=kept)
        deltas = msgspec.Raw(msgspec.msgpack.encode(steps))
        error = Failure(type="ValueError", message="no")
        return encode(
            EditRecord(edit="a", version=3, engine="e", request="r", deltas=deltas, manifest=[manifest], error=error)
        )

    async with Bus.open(redis_url, prefix=prefix) as bus, edits.watch("a") as told:
        await bus.edits.publish("tiny", "a", record(digest(whole)))
        item = await anext(told)
        assert item.error is not None
        assert (item.version, item.request, item.error.message) == (3, "r", "no")
        assert [rows.tolist() for rows in item.saves["rows"]] == [rows.tolist() for rows in whole]
        await bus.edits.publish("tiny", "a", record(digest([array])))
        await bus.edits.publish("tiny", "a", record(digest(whole)))
        with pytest.raises(tracewire.StateMismatch, match="differs from what the engine collected: rows"):
            await anext(told)
        # The next one is read.
        again = await anext(told)
        assert again.id > item.id
    with pytest.raises(StopAsyncIteration):
        await anext(told)
    with pytest.raises(ValueError):
        edits.watch("a", since="yesterday")


async def test_an_engine_that_knows_no_edits_is_not_asked_for_any(client: Client, redis_url: str, prefix: str) -> None:
    info = engine_info("tiny", "old", schema="1.0")
    async with BusEngine.running(redis_url, prefix, tiny, info) as engine:
        for options in ({"edits": []}, {"edits": ["a"]}):
            with pytest.raises(tracewire.TraceRejected, match="engine old is of a version that knows no edits") as old:
                async with client.trace("tiny", "hello", **options):
                    pass
            assert old.value.field == "edits"
        async with client.trace("tiny", prompts=["hello"]) as trace:
            await trace.result()
        assert [submission.edits for submission in engine.taken] == [None]


async def test_edits_end_with_their_client(redis_url: str, prefix: str) -> None:
    async with tracewire.connect(redis_url, prefix=prefix) as client:
        edits = client.edits("tiny")
        told = edits.watch("a")
    with pytest.raises(tracewire.ConnectError, match="closed"):
        await edits.list()
    with pytest.raises(tracewire.ConnectError, match="closed"):
        await anext(told)


async def test_a_printed_edit_is_short(edits: Edits, redis_url: str, prefix: str) -> None:
    steer = tracewire.Steer("residual(2)", np.ones(8, np.float32), scale=2.0)
    assert repr(steer) == "Steer(at='residual(2)', vector=<float32 [8]>, scale=2.0)"
    async with BusEngine.running(redis_url, prefix, tiny, engine_info("tiny", "e", **FOLLOWS)):
        edit = await edits.install("a", interventions=[steer, Probe("p", "residual(1)", weight=[1.0] * 8)])
    assert "Steer(at='residual(2)', vector=<float32 [8]>" in repr(edit)
    assert len(repr(edit)) < 500
    assert (
        repr(Probe("p", "residual(1)", weight=[1.0] * 64)) == "Probe(name='p', at='residual(1)', weight=<list of 64>)"
    )
