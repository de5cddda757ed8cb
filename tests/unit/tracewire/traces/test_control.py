"""Steering, cancelling and deadlines on the bus: what holds with no engine, a dead one, or a scripted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import BusEngine, Stage, engine_info, tiny
from tests.support.clients import events_of
from tests.support.queue import settled
from tests.support.redis.proxy import proxy
from tracewire import Accepted, Client, Final, FirstToken, Output, Paused, Resumed, Steered
from tracewire_bus.bus import Bus, Fenced
from tracewire_bus.store.trace_records import SteerRefused
from tracewire_bus.wire.codec import decode_submission
from tracewire_bus.wire.live_values import live_values

PATIENCE = 60


def running(embedded: str, prefix: str, script: Any = tiny) -> Any:
    """A scripted engine."""
    return BusEngine.running(embedded, prefix, script, engine_info())


async def test_a_queued_trace_starts_with_what_it_was_steered_to(
    client: Client, bus: Bus, embedded: str, prefix: str, registered: str
) -> None:
    vector = np.arange(4, dtype=np.float32)
    async with client.trace("tiny", "hello", live={"alpha": 0.0, "vector": vector}, detach=True) as trace:
        assert await trace.steer(alpha=2) == 1
        assert await trace.steer({"vector": vector + 1}, by="somebody", if_version=1) == 2
        assert (await client.get_live(trace.id)).version == 2
        async with running(embedded, prefix):
            events = await events_of(client, trace.id)
    accepted, steered = events[0], events[1]
    assert accepted.live_version == 2
    assert accepted.live["alpha"] == 2
    assert np.array_equal(accepted.live["vector"], vector + 1)
    assert [(change.version, change.by) for change in steered.changes] == [(1, "one"), (2, "somebody")]
    assert steered.first == [FirstToken(invoke=0, choice=0, index=0)]
    assert steered.first[0].index == 0
    assert steered.id == "1-1"
    assert isinstance(events[-1], Final)


async def test_a_queued_trace_is_cancelled_at_once(
    client: Client, bus: Bus, embedded: str, prefix: str, registered: str
) -> None:
    async with client.trace("tiny", "hello", detach=True) as trace:
        assert await bus.queue.waiting("tiny") == 1
        assert await trace.cancel("not needed", by="me")
        assert await bus.queue.waiting("tiny") == 0
        with pytest.raises(tracewire.TraceFailed, match="cancelled by me: not needed") as caught:
            await trace.result()
        assert caught.value.status == "cancelled"
        assert not await trace.cancel()
        async with running(embedded, prefix) as engine, client.trace("tiny", "other") as other:
            await other.result()
            assert [submission.trace for submission in engine.taken] == [other.id]


async def test_leaving_a_trace_cancels_it_unless_it_is_detached(
    client: Client, bus: Bus, embedded: str, prefix: str, registered: str
) -> None:
    """Before an engine has taken it, and while one runs it."""
    runs = anyio.Event()

    async def waits(stage: Stage) -> None:
        await stage.accept()
        runs.set()
        await anyio.sleep_forever()

    async with client.trace("tiny", "kept", detach=True) as kept, client.trace("tiny", "left") as left:
        assert await bus.queue.waiting("tiny") == 2
    assert await bus.queue.waiting("tiny") == 1
    (final,) = await events_of(client, left.id)
    assert final.status == "cancelled"
    assert "its submitter has left it" in final.error.message
    await kept.cancel()
    async with running(embedded, prefix, waits):
        with anyio.fail_after(PATIENCE):
            async with client.trace("tiny", "left") as left:
                await runs.wait()
        *_, final = await events_of(client, left.id)
    assert final.status == "cancelled"


@pytest.mark.parametrize("canceller", ["another client", "its own service"])
async def test_what_iterates_over_a_cancelled_trace_hears_of_it_after_the_last_output(
    client: Client, embedded: str, prefix: str, canceller: str
) -> None:
    async def waits(stage: Stage) -> None:
        await stage.accept()
        await stage.save("one", {"x": 1})
        await stage.save(" two", {"x": 2})
        await anyio.sleep_forever()

    texts: list[str] = []
    async with (
        running(embedded, prefix, waits),
        tracewire.connect(embedded, prefix=prefix, name="other") as other,
        client.trace(await client.models.get("tiny", timeout=PATIENCE), "hello") as trace,
    ):
        with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed) as caught:
            async for item in trace:
                assert isinstance(item, Output)
                texts.append(item.text)
                if len(texts) == 2:
                    await (other if canceller == "another client" else client).cancel(trace.id)
        *_, final = await events_of(other, trace.id)
    assert texts == ["one", " two"]
    assert caught.value.status == "cancelled"
    assert caught.value.result is not None
    assert caught.value.result.text == "one two"
    assert isinstance(final, Final)
    assert final.status == "cancelled"


async def test_a_change_that_does_not_fit_what_was_declared_is_refused_by_name(
    client: Client, bus: Bus, registered: str
) -> None:
    """None of its values is taken, and its version is the next one's."""
    live = {"alpha": 0.0, "name": "a", "flag": True, "vector": np.zeros(4, np.float32)}
    async with client.trace("tiny", "hello", live=live) as trace:
        for values, field in [
            ({"alpha": "high"}, "live.alpha"),
            ({"name": 1.0}, "live.name"),
            ({"flag": 1.0}, "live.flag"),
            ({"vector": np.zeros(5, np.float32)}, "live.vector"),
            ({"vector": np.zeros(4, np.int64)}, "live.vector"),
            ({"alpha": 1.0, "vector": np.zeros((2, 2), np.float32)}, "live.vector"),
            ({"alpha": 1.0, "beta": 1.0}, "live.beta"),
        ]:
            with pytest.raises(tracewire.SteerRejected) as caught:
                await trace.steer(values)
            assert caught.value.field == field
        now = await client.get_live(trace.id)
        assert (now.version, now.values["alpha"], now.values["name"]) == (0, 0.0, "a")
        assert await trace.steer(alpha=1, vector=np.ones(4, np.float64)) == 1


async def test_a_trace_of_a_dead_engine_can_be_cancelled(client: Client, bus: Bus, registered: str) -> None:
    """What it had put out stands, and nothing that it might still write is taken."""
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace, bus.writer() as writer:
            opened = await bus.records.open(trace.id, registered)
            (entry,) = await bus.queue.take("tiny", registered, 1, 1000)
            stage = Stage(decode_submission(entry.fields[b"d"]), writer, engine_info(), 0.0, bus, opened)
            await stage.accept()
            await stage.save("one", {"x": 1})
            await bus.registry.unregister(registered)
            assert await trace.cancel()
            with pytest.raises(tracewire.TraceFailed) as caught:
                await trace.result()
            assert caught.value.status == "cancelled"
            assert caught.value.result.text == "one"
            assert caught.value.result.saves == {"x": [1]}
            with pytest.raises(Fenced):
                await stage.save("two", {"x": 2})
            with pytest.raises(Fenced):
                await stage.final()
            with pytest.raises(tracewire.TraceEnded):
                await trace.steer(x=1)


async def test_what_waits_on_a_lease_that_is_gone_is_buried(client: Client, bus: Bus, registered: str) -> None:
    async with client.trace("tiny", "hello") as left, client.trace("tiny", "hello", detach=True) as kept:
        (lease,) = [lease for lease in await bus.queue.leases("tiny") if lease]
        assert await bus.leases.held([lease]) == {lease}
        assert await bus.queue.waiting("tiny") == 2
        await bus.cancel_orphans("tiny", lease, by="the bus")
        assert [lease for lease in await bus.queue.leases("tiny") if lease] == []
        assert await bus.queue.waiting("tiny") == 1
        (final,) = await events_of(client, left.id)
        assert final.status == "cancelled"
        assert "submitter has gone" in final.error.message
        await kept.cancel()


async def test_a_change_whose_answer_was_lost_is_made_once(
    client: Client, embedded: str, prefix: str, tmp_path: Path, registered: str
) -> None:
    async with client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
        async with proxy(embedded, tmp_path) as way, tracewire.connect(way.url, prefix=prefix) as other:
            assert await other.steer(trace.id, alpha=1.0) == 1
            way.swallow = b"alpha"
            assert await other.steer(trace.id, alpha=2.0) == 2
            assert way.swallowed.is_set()
            assert await other.steer(trace.id, alpha=3.0, if_version=2) == 3
        assert (await client.get_live(trace.id)).values == {"alpha": 3.0}


async def test_orders_come_once_and_in_order_over_a_broken_way(
    client: Client, bus: Bus, embedded: str, prefix: str, tmp_path: Path, registered: str
) -> None:
    async with client.trace("tiny", "hello", live={"alpha": 0}) as trace:
        await bus.records.open(trace.id, registered)
        found: list[int] = []
        async with proxy(embedded, tmp_path) as way, Bus.open(way.url, prefix=prefix) as reading:
            reader = reading.control(registered)
            for turn in range(30):
                for value in range(3):
                    await trace.steer(alpha=turn * 3 + value)
                if turn % 3 == 0:
                    # The answer to the next read is lost.
                    way.swallow = b"XREAD"
                elif turn % 3 == 1:
                    await way.cut()
                while len(found) < turn * 3 + 3:
                    with anyio.fail_after(PATIENCE):
                        orders = await reader.read(200)
                    found += [trace_order(order.change) for order in orders]
            await reader.read(1)
            await reader.aclose()
        assert found == list(range(90))
        tag = bus.keys.tag(trace.id)
        assert await bus.command("XLEN", bus.keys.control(tag, registered)) == 0


def trace_order(data: bytes) -> int:
    """The value in a change."""
    from tracewire_bus.wire.codec import decode_change

    return int(decode_change(data).values["alpha"])


async def test_ten_thousand_changes_and_no_more(client: Client, bus: Bus, registered: str) -> None:
    """A trace whose engine stands still takes so many; then controllers are told, and nothing is lost."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}) as trace:
        opened = await bus.records.open(trace.id, registered)
        refused: list[str] = []

        async def many(first: int) -> None:
            for number in range(first, 10_040, 8):
                try:
                    await bus.records.steer(trace.id, live_values({"alpha": float(number)}), by="x")
                except SteerRefused as error:
                    refused.append(error.reason)

        async with anyio.create_task_group() as group:
            for first in range(8):
                group.start_soon(many, first)
        assert refused == ["busy"] * 40
        with pytest.raises(tracewire.SteerRejected) as caught:
            await trace.steer(alpha=1.0)
        assert caught.value.reason == "busy"
        assert (await client.get_live(trace.id)).version == 10_000
        changes = await bus.records.close(trace.id, 1)
        assert len(changes) == 10_000
        with pytest.raises(tracewire.TraceEnded):
            await trace.steer(alpha=1.0)
        async with bus.writer() as writer:
            await writer.append(trace.id, opened.attempt, 0, b"", live_version=9_999)
        assert len(await bus.records.close(trace.id, 1)) == 1


async def test_every_consumer_sees_one_order(client: Client, embedded: str, prefix: str) -> None:
    enough = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("x", {"alpha": stage.live["alpha"]})
        while not enough.is_set():
            await stage.save("x", {"alpha": stage.live["alpha"]})
        await stage.final()

    async with (
        running(embedded, prefix, script),
        client.trace("tiny", "hello", live={"alpha": 0}) as trace,
        tracewire.connect(embedded, prefix=prefix) as other,
    ):
        accepted: dict[int, int] = {}
        seen: list[list[Any]] = [[], []]

        async def control(number: int) -> None:
            accepted[await (client, other)[number % 2].steer(trace.id, alpha=number)] = number

        async def follow(events: list[Any]) -> None:
            events.extend(await events_of(client, trace.id))

        async with anyio.create_task_group() as consumers:
            for events in seen:
                consumers.start_soon(follow, events)
            async with anyio.create_task_group() as controllers:
                for number in range(1, 101):
                    controllers.start_soon(control, number)
            while (await client.get_state(trace.id)).live_version < 100:
                pass
            enough.set()
        result = await trace.result()
    assert sorted(accepted) == list(range(1, 101))
    for events in seen:
        changes = [change for event in events if isinstance(event, Steered) for change in event.changes]
        assert {change.version: change.values["alpha"] for change in changes} == accepted
        assert [change.version for change in changes] == list(range(1, 101))
        alpha, used = 0, []
        for event in events:
            if isinstance(event, Steered):
                alpha = event.changes[-1].values["alpha"]
            elif isinstance(event, Output):
                used.append(alpha)
        assert used == result.saves["alpha"]


async def test_an_id_is_not_used_again_when_its_trace_is_forgotten(
    client: Client, bus: Bus, embedded: str, prefix: str
) -> None:
    async with running(embedded, prefix):
        async with client.trace("tiny", "hello", trace_id="mine") as trace:
            await trace.result()
        async with client.trace("tiny", "hello", trace_id="mine") as again:
            assert (await again.result()).text == "one two three"
        # Until then it could be submitted once more.
        await settled(bus)
        await bus.command("DEL", bus.keys.events("mine"), bus.keys.record("mine"))
        with pytest.raises(tracewire.TraceIdTaken, match="take another one") as caught:
            await client.trace("tiny", "hello", trace_id="mine").start()
        assert caught.value.trace_id == "mine"
        with pytest.raises(tracewire.UnknownTrace):
            await client.get_state("mine")


@pytest.mark.parametrize(
    ("live", "said"),
    [
        ({"alpha": float("nan")}, "finite"),
        ({"alpha": np.array([1.0, np.inf])}, "finite"),
        ({"alpha": [1, 2]}, "expected a number"),
        ({"alpha": None}, "expected a number"),
        ({"alpha": np.zeros(300_000, np.float32)}, "the limit is 1048576"),
        ({f"p{number}": 0 for number in range(65)}, "at most 64"),
    ],
)
def test_what_no_live_parameter_can_be(client: Client, live: dict[str, Any], said: str) -> None:
    with pytest.raises(tracewire.TraceRejected, match=said) as caught:
        client.trace("tiny", "hello", live=live)
    assert caught.value.field.startswith("live")


async def test_a_change_whose_answer_was_lost_is_accepted_though_its_trace_has_ended_since(
    client: Client, bus: Bus, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again under the same operation is told what came of it."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:

        async def steer() -> int:
            with monkeypatch.context() as patched:
                patched.setattr("tracewire_bus.store.trace_records.secrets.token_hex", lambda _: "the operation")
                return await bus.records.steer(trace.id, live_values({"alpha": 1.0}), by="x")

        assert await steer() == 1
        assert await trace.cancel()
        assert await steer() == 1
        with pytest.raises(tracewire.TraceEnded):
            await trace.steer(alpha=2.0)
        assert 0 < await bus.command("TTL", bus.keys.operations(trace.id)) <= 60


async def test_a_trace_is_paused_and_resumed_on_the_bus(embedded: str, prefix: str) -> None:
    """While it is queued, and while it runs: told once each, in order; not after its end."""
    turns = [anyio.Event(), anyio.Event()]

    async def script(stage: Stage) -> None:
        await stage.accept()
        for turn in turns:
            await stage.going()
            await stage.output("x")
            await turn.wait()
        await stage.going()
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with (
            Bus.open(embedded, prefix=prefix) as bus,
            tracewire.connect(embedded, prefix=prefix, name="one") as client,
        ):
            await bus.registry.register(engine_info(), ttl_s=600)
            async with client.trace("tiny", "hello", detach=True) as trace:
                assert await trace.pause(by="me")
                assert not await client.pause(trace.id)
                assert await trace.resume()
                assert not await trace.resume()
                assert await trace.pause(by="you")
                async with BusEngine.running(embedded, prefix, script):
                    assert isinstance(await anext(trace), Paused)
                    assert await trace.resume()
                    assert isinstance(await anext(trace), Resumed)
                    assert isinstance(await anext(trace), Output)
                    assert await trace.pause()
                    assert not await trace.pause()
                    assert isinstance(await anext(trace), Paused)
                    turns[0].set()
                    assert await trace.resume()
                    assert isinstance(await anext(trace), Resumed)
                    turns[1].set()
                    assert (await trace.result()).text == "xx"
                with pytest.raises(tracewire.TraceEnded):
                    await trace.pause()
                with pytest.raises(tracewire.TraceEnded):
                    await trace.resume()
                with pytest.raises(tracewire.UnknownTrace):
                    await client.pause("nobody")
                events = [event async for event in client.subscribe(trace.id)]
    kinds = [Accepted, Paused, Resumed, Output, Paused, Resumed, Output, Final]
    assert [type(event) for event in events] == kinds
    assert [event.by for event in events if isinstance(event, Paused)] == ["you", "one"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("odd", [5, "\udc80", b"me"])
async def test_who_asks_and_why_is_text(client: Client, odd: Any) -> None:
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        for asked in (trace.cancel, trace.pause, trace.resume):
            with pytest.raises((TypeError, ValueError), match="by: expected text"):
                await asked(by=odd)
        with pytest.raises((TypeError, ValueError), match="reason: expected text"):
            await trace.cancel(odd)
        with pytest.raises(tracewire.SteerRejected) as caught:
            await trace.steer(alpha=1.0, by=odd)
        assert caught.value.field == "by"
        assert await trace.cancel("genug", by="jemand \N{GREEK SMALL LETTER ALPHA}")


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("odd", ["\ud800", 5, None, [1], b"text"])
async def test_odd_words_are_named(client: Client, odd: Any) -> None:
    """What is no text is refused by the name of its argument, before anything is sent."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        with pytest.raises((TypeError, ValueError), match=r"^reason: expected text"):
            await trace.cancel(odd)
        if odd is not None:
            for call in (client.cancel, client.pause, client.resume):
                with pytest.raises((TypeError, ValueError), match=r"^by: expected text"):
                    await call(trace.id, by=odd)
        assert (await client.get_live(trace.id)).version == 0
    if odd is not None:
        with pytest.raises((TypeError, ValueError), match=r"^name: expected text"):
            async with tracewire.connect("embedded://", name=odd):
                pass
    calls: list[Any] = [client.get_live, client.cancel, client.pause, client.resume, client.get_state]
    for call in [*calls, lambda name: client.steer(name, alpha=1.0)]:
        with pytest.raises(tracewire.UnknownTrace if isinstance(odd, str) else TypeError, match=r"trace"):
            await call(odd)
