"""A cluster of three real masters: nothing is lost, repeated or reordered, also not while slots move between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from redis.exceptions import AskError, RedisError

from tests.support import ROOT
from tests.support.authors import Author, read, same
from tests.support.bus_engine import engine_info
from tests.support.redis.servers import BINARIES, HOST, Cluster, Running, free_port, running_servers, slot_of
from tests.support.redis.transports import end_to_end
from tests.support.until import until
from tests.support.vectors import encoded
from tracewire_bus.bus import FINAL_ID, Bus, BusError, BusUnavailable, Entry, Fenced, NotAllowed
from tracewire_bus.events.writer import Writer
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.transport.cluster import Cluster as Slots
from tracewire_bus.transport.cluster import ClusterLink
from tracewire_bus.transport.link import AfterOthers
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.live_values import live_values
from tracewire_bus.wire.messages import Invoke, Submission
from tracewire_bus.wire.packing import pack

RULES = ROOT / "deploy" / "redis"


@pytest.fixture(scope="module", params=BINARIES)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster of each version, for all tests that leave its nodes alive."""
    async with running_servers(request.param) as servers:
        yield await servers.cluster(3)


@asynccontextmanager
async def linked(cluster: Cluster) -> AsyncIterator[ClusterLink]:
    link = ClusterLink(Slots(cluster.url))
    try:
        yield link
    finally:
        await link.drop()


async def rest(bus: Bus, trace: str) -> list[Entry]:
    """All entries to the end."""
    with anyio.fail_after(30):
        return [entry async for entry in bus.read(trace)]


async def elsewhere(cluster: Cluster, bus: Bus, *nodes: Running) -> str:
    """A trace that is on another node."""
    number = 0
    while await cluster.owner(slot_of(bus.keys, f"e{number}")) in nodes:
        number += 1
    return f"e{number}"


def assert_whole(entries: list[Entry], count: int) -> None:
    assert [int(entry.data) for entry in entries] == list(range(count + 1))
    assert [entry.id for entry in entries] == [*(f"1-{seq}" for seq in range(count)), FINAL_ID]


class Writing:
    """Many appends of one trace, all queued at once or in step with others, and how far they are."""

    def __init__(self, bus: Bus, trace: str, count: int) -> None:
        self._bus = bus
        self._trace = trace
        self._count = count
        self.done = 0
        #: How many may be appended by now. The first and the last of a trace need several keys of its slot at once.
        self.most = count

    async def run(self, writer: Writer) -> None:
        async with anyio.create_task_group() as group:
            for first in range(0, self._count, 10):
                await until(self._may(first))
                for seq in range(first, min(first + 10, self._count)):
                    # Queued in order; each waits by itself.
                    group.start_soon(self._one, writer.submit(self._trace, 1, seq, b"%d" % seq))
                # A flush begins before there is more.
                await checkpoint()
                await until(self._near(first))
        await writer.append(self._trace, 1, self._count, b"%d" % self._count, final=True)

    def _may(self, first: int):
        async def may() -> bool:
            return first < self.most

        return may

    def _near(self, first: int):
        async def near() -> bool:
            return self.done >= first - 40

        return near

    async def _one(self, append) -> None:
        await append
        self.done += 1

    async def past(self, number: int) -> None:
        """Wait until so many are there."""

        async def is_past() -> bool:
            return self.done >= number

        await until(is_past)


async def test_what_nodes_lack_is_appended_again_to_each(cluster: Cluster, prefix: str) -> None:
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        traces = [f"trace{number}" for number in range(12)]
        for trace in traces:
            for seq in range(3):
                life = lifecycle_fields("accepted", trace, model="m", engine="e", attempt=1) if seq == 0 else None
                await writer.append(trace, 1, seq, b"%d" % seq, lifecycle=life)
        lost = traces[::2]
        for trace in lost:
            await bus.command("DEL", bus.keys.events(trace))
            await bus.command("DEL", bus.keys.firehose(bus.keys.tag(trace)))
        await writer.restorer.link.drop()
        # It goes behind what comes back on any node.
        for trace in traces:
            await writer.append(trace, 1, 3, b"3", final=True)
        for trace in traces:
            assert_whole(await rest(bus, trace), 3)
        tags = {bus.keys.tag(trace) for trace in lost}
        for tag in tags:
            entries = await bus.command("XRANGE", bus.keys.firehose(tag), "-", "+")
            told = [dict(zip(flat[::2], flat[1::2], strict=True))[b"t"].decode() for _, flat in entries]
            assert sorted(told) == [trace for trace in sorted(lost) if bus.keys.tag(trace) == tag]


@pytest.mark.parametrize("learned", ["by the writer", "by others"])
async def test_a_node_that_was_replaced_under_living_connections_gets_what_it_lacks(
    cluster: Cluster, prefix: str, learned: str
) -> None:
    """The old node lives, sends its clients on, and what it had not handed to the new one is gone."""
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        others = [f"o{number}" for number in range(30)]
        for seq in range(5):
            await writer.append("t", 1, seq, b"%d" % seq)
        source = await cluster.owner(slot)
        target = next(node for node in cluster.nodes if node is not source)
        # It has never heard of the new one.
        assert writer.restorer.link._nodes.keys() <= {(HOST, node.port) for node in cluster.nodes}  # type: ignore[attr-defined]
        opened = writer.restorer.link.opened
        for key in await source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1000):
            await source.ask("DEL", key)
        await cluster.end_move(slot, source, target)
        if learned == "by others":
            assert await bus.command("EXISTS", bus.keys.events("t")) == 0
        async with anyio.create_task_group() as group:
            for seq in range(5, 8):
                group.start_soon(writer.append, "t", 1, seq, b"%d" % seq)
            for other in others:
                group.start_soon(writer.append, other, 1, 0, b"0")
        await writer.append("t", 1, 8, b"8", final=True)
        for other in others:
            await writer.append(other, 1, 1, b"1", final=True)
            assert_whole(await rest(bus, other), 1)
        assert_whole(await rest(bus, "t"), 8)
        assert writer.restorer.link.opened > opened


async def test_everything_on_a_cluster(cluster: Cluster, prefix: str) -> None:
    await end_to_end(cluster.url, prefix)
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        traces = [f"trace{number}" for number in range(40)]
        assert len({(await cluster.owner(slot_of(bus.keys, trace))).port for trace in traces}) == 3
        found: dict[str, list[Entry]] = {}

        async def follow(trace: str) -> None:
            found[trace] = await rest(bus, trace)

        async def write(trace: str) -> None:
            for seq in range(5):
                await writer.append(trace, 1, seq, b"%d" % seq)
            await writer.append(trace, 1, 5, b"5", final=True)

        async with anyio.create_task_group() as group:
            for trace in traces:
                group.start_soon(follow, trace)
                group.start_soon(write, trace)
        for trace in traces:
            assert_whole(found[trace], 5)
        with pytest.raises(Fenced):
            await writer.append(traces[0], 1, 6, b"too late")
        # Everything else that goes to several slots.
        for number, trace in enumerate(traces):
            await bus.submit(
                Submission(trace=f"q{trace}", model="m", client=f"c{number % 3}", invokes=[Invoke(prompt="x")])
            )
        assert await bus.queue.clients("m") == {"c0": 14, "c1": 13, "c2": 13}
        taken = await bus.queue.take("m", "e", 10, 1000)
        assert [one.trace for one in taken] == [f"qtrace{number}" for number in range(10)]
        assert await bus.exists("qtrace1")
        assert not await bus.exists("nothing")
        assert (await bus.records.left("qtrace1"))[0]
        await bus.queue.done("m", "qtrace0")
        await bus.cancel("qtrace39", by="me")
        assert await bus.queue.waiting("m") == 29
        await bus.sweep(bus.keys.tags)
        await bus.leases.renew("one", 5)
        assert await bus.leases.held(["one", "two", "three"]) == {"one"}
        for running in (0, 1):
            for name in ("a", "b", "c"):
                await bus.registry.register(engine_info(engine=name, running=running))
            assert [(info.engine, info.running) for info in await bus.registry.list()] == [
                (one, running) for one in "abc"
            ]
        await bus.registry.drain("a", by="me")
        assert await bus.recovery("m").look() == []
        await bus.registry.unregister("b")
        assert sorted(info.engine for info in await bus.registry.list()) == ["a", "c"]
        array = np.arange(700_000, dtype=np.float32)
        ref = await bus.blobs.store("t", array)
        assert np.array_equal(await bus.blobs.load("t", ref), array)
        # In one call, on whichever nodes their keys are.
        vectors = dict(encoded(array[: 5000 + number]) for number in range(8))
        await bus.vectors.store(vectors)
        for vector in vectors:
            assert np.array_equal(await bus.vectors.fetch(vector), array[: vector.shape[0]])


@pytest.mark.parametrize("how", ["at once", "key by key", "key by key, under new connections"])
async def test_a_slot_moves_in_the_middle_of_appends_under_a_subscription(
    cluster: Cluster, prefix: str, how: str
) -> None:
    count = 400
    async with Bus.open(cluster.url, prefix=prefix) as bus:
        slot = slot_of(bus.keys, "t")
        # Another trace on the same slot, one on another, and one that is only waited for.
        same = next(f"s{n}" for n in range(10_000) if slot_of(bus.keys, f"s{n}") == slot)
        found: dict[str, list[Entry]] = {}

        async def follow(trace: str) -> None:
            found[trace] = await rest(bus, trace)

        async with bus.writer() as writer, anyio.create_task_group() as group:
            writings = {trace: Writing(bus, trace, count) for trace in ("t", same, "other")}
            for trace, writing in writings.items():
                group.start_soon(follow, trace)
                group.start_soon(writing.run, writer)
            for step in (60, 160):
                for writing in writings.values():
                    writing.most = step + 100
                    await writing.past(step)
                if how != "at once":
                    source, target = await cluster.begin_move(slot)
                    # One of the streams stays behind, for as long as it takes the others to go on.
                    await cluster.move_keys(slot, source, target, but=[bus.keys.events(same).encode()])
                    if "new" in how:
                        await writer.restorer.link.drop()
                    await writings["t"].past(step + 60)
                    await writings[same].past(step + 60)
                    await cluster.finish_move(slot, source, target)
                else:
                    await cluster.move(slot)
            for writing in writings.values():
                writing.most = count
        for trace in writings:
            assert_whole(found[trace], count)
            assert_whole(await rest(bus, trace), count)


async def test_a_slot_whose_move_stands_still_holds_up_no_other(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what takes one key of it. What takes several waits, and with it what must not be done before."""
    # What waits is tried again with all that follows.
    monkeypatch.setattr("tracewire_bus.events.deferred.RETRY_S", 0.0)
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        names = [f"s{n}" for n in range(10_000) if slot_of(bus.keys, f"s{n}") == slot][:2]
        for trace in ("t", *names):
            await bus.submit(Submission(trace=trace, model="m", invokes=[Invoke(prompt="x")]))
        for trace in ("t", names[0]):
            await writer.append(trace, 1, 0, b"0")
        ending, beginning = names
        (taken, *_) = await bus.queue.take("m", "e", 3, 1000)
        assert taken.trace == "t"
        source, target = await cluster.begin_move(slot)
        await cluster.move_keys(slot, source, target, but=[bus.keys.events(ending).encode()])
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                done = ("m", ending, "e")
                group.start_soon(partial(writer.append, ending, 1, 1, b"1", final=True, settles=done))
                group.start_soon(writer.append, beginning, 1, 0, b"0")
                for seq in range(1, 20):
                    await writer.append("t", 1, seq, b"%d" % seq)
                    await writer.append(f"o{seq}", 1, 0, b"0")
                    await writer.append(f"o{seq}", 1, 1, b"1", final=True, settles=("m", f"o{seq}", "e"))
                # Whoever looks for it would find it: it is lost with this engine else.
                assert await bus.command("HGET", bus.keys.queue("m", "taken"), ending) == b"e"
                assert await bus.command("XLEN", bus.keys.events(ending)) == 1
                assert await bus.command("XLEN", bus.keys.events(beginning)) == 0
                await cluster.finish_move(slot, source, target)
            assert await bus.command("HGET", bus.keys.queue("m", "taken"), ending) is None
            await writer.append("t", 1, 20, b"20", final=True)
            await writer.append(beginning, 1, 1, b"1", final=True)
        assert_whole(await rest(bus, "t"), 20)
        assert_whole(await rest(bus, ending), 1)
        assert_whole(await rest(bus, beginning), 1)


async def test_what_a_node_lost_of_a_slot_that_moves_comes_back_when_it_has_moved(
    cluster: Cluster, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        for seq in range(6):
            await writer.append("t", 1, seq, b"%d" % seq)
        source, target = await cluster.begin_move(slot)
        left = [key for key in await source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100) if b"events" not in key]
        await cluster.move_keys(slot, source, target, but=left)
        # Its end is gone, as with a replica that lagged.
        await bus.command("XDEL", bus.keys.events("t"), "1-4", "1-5")
        await bus.command("XSETID", bus.keys.events("t"), "1-3")
        await writer.restorer.link.drop()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(writer.append, "t", 1, 6, b"6")
                await until(lambda: "entries wait for Redis" in caplog.text)
                assert await bus.command("XLEN", bus.keys.events("t")) == 4
                await cluster.finish_move(slot, source, target)
            await writer.append("t", 1, 7, b"7", final=True)
        assert_whole(await rest(bus, "t"), 7)


async def test_a_queue_whose_move_stands_still_holds_up_no_trace(cluster: Cluster, prefix: str) -> None:
    """A final is appended, and its append ends when its queue entry is settled."""
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        queued = Slots(cluster.url).slot(bus.keys.queue("m", "taken"))
        assert slot_of(bus.keys, "t") != queued
        await bus.submit(Submission(trace="t", model="m", invokes=[Invoke(prompt="x")]))
        await bus.queue.take("m", "e", 1, 1000)
        source, target = await cluster.begin_move(queued)
        taken = bus.keys.queue("m", "taken").encode()
        await cluster.move_keys(queued, source, target, but=[taken])
        ended = anyio.Event()

        async def end() -> None:
            await writer.append("t", 1, 0, b"0", final=True, settles=("m", "t", "e"))
            ended.set()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(end)
                for seq in range(20):
                    await writer.append("o", 1, seq, b"%d" % seq)
                assert await bus.command("XLEN", bus.keys.events("t")) == 1
                # Also where it has to connect anew.
                await writer.restorer.link.drop()
                await writer.append("o", 1, 20, b"20")
                assert not ended.is_set()
                assert await bus.command("HGET", taken, "t") == b"e"
                await cluster.finish_move(queued, source, target)
        assert await bus.command("HGET", taken, "t") is None


async def test_what_fails_while_something_waits_behind_ends_it_and_nothing_else(cluster: Cluster, prefix: str) -> None:
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        taken = bus.keys.queue("m", "taken")
        queued = Slots(cluster.url).slot(taken)
        await bus.submit(Submission(trace="t", model="m", invokes=[Invoke(prompt="x")]))
        await bus.queue.take("m", "e", 1, 1000)
        source, target = await cluster.begin_move(queued)
        await cluster.move_keys(queued, source, target, but=[taken.encode()])

        def broken() -> list[tuple[Any, ...]]:
            raise RuntimeError("broken")

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:

                async def end() -> None:
                    with pytest.raises(RuntimeError, match="broken"):
                        await writer.append("t", 1, 0, b"0", final=True, settles=("m", "t", "e"))
                    writer.restorer.claims = tuple

                group.start_soon(end)
                await until(lambda: writer._deferred)
                writer.restorer.claims = broken
                await writer.restorer.link.drop()
            await writer.append("o", 1, 0, b"0")
        await cluster.finish_move(queued, source, target)


async def test_a_later_attempt_goes_behind_what_waits_of_an_earlier_one(cluster: Cluster, prefix: str) -> None:
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        source, target = await cluster.begin_move(slot)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                first = writer.submit("t", 1, 0, b"0")
                # Its attempt is taken from us, and comes back.
                writer.forget("t")
                group.start_soon(lambda: first)
                await until(lambda: bus.keys.events("t") in writer._stuck)
                group.start_soon(writer.append, "t", 2, 0, b"0")
                await cluster.finish_move(slot, source, target)
            await writer.append("t", 2, 1, b"1", final=True)
        assert [entry.id for entry in await rest(bus, "t")] == ["1-0", "2-0", FINAL_ID]


async def test_who_connects_anew_waits_for_no_move(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a stream's repair takes is on one node still, but not all that goes with its events."""
    monkeypatch.setattr("tracewire_bus.events.restore.CHECK_S", 0.1)
    monkeypatch.setattr("tracewire_bus.events.restore.KEEP_S", 0.2)
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        accepted = lifecycle_fields("accepted", "t", model="m", engine="e", attempt=1)
        await writer.append("t", 1, 0, b"0", lifecycle=accepted)
        await writer.append("t", 1, 1, b"1")
        source, target = await cluster.begin_move(slot)
        await writer.restorer.link.drop()
        with anyio.fail_after(30):
            await writer.append("t", 1, 2, b"2")
            await writer.append("o", 1, 0, b"0")
            # Nor is it forgotten with what it goes with.
            await until(lambda: not writer.restorer._kept)
            await writer.restorer.link.drop()
            await writer.append("t", 1, 3, b"3")
            assert writer._deferred
            await cluster.finish_move(slot, source, target)
            await writer.append("t", 1, 4, b"4", final=True)
        assert_whole(await rest(bus, "t"), 4)
        # It is done at last, and does not outlive the end.
        await until(lambda: not writer._deferred)
        assert await bus.command("TTL", bus.keys.events("t")) < 7 * 24 * 3600 - 60


async def test_what_waits_apart_is_tried_in_turns_and_not_with_all_that_others_write(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        stays = slot_of(bus.keys, "t")
        names = [f"s{n}" for n in range(10_000)]
        moves = next(name for name in names if slot_of(bus.keys, name) != stays)
        halves = []
        for trace in ("t", moves):
            await writer.append(trace, 1, 0, b"0")
            source, target = await cluster.begin_move(slot_of(bus.keys, trace))
            await cluster.move_keys(slot_of(bus.keys, trace), source, target, but=[bus.keys.events(trace).encode()])
            halves.append((slot_of(bus.keys, trace), source, target))
        sent: list[str] = []
        ask = writer.restorer.link.execute

        async def watched(*commands: Any, **more: Any) -> list[Any]:
            sent.extend(command[3] for command in commands if command[0] == "EVAL")
            return await ask(*commands, **more)

        monkeypatch.setattr(writer.restorer.link, "execute", watched)
        # One of them fills a flush.
        monkeypatch.setattr("tracewire_bus.events.batches.ROUND_BYTES", 1000)
        monkeypatch.setattr("tracewire_bus.events.deferred.RETRY_S", 3600.0)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(writer.append, "t", 1, 1, b"1" * 1000, final=True))
                await until(lambda: bus.keys.events("t") in writer._stuck)
                group.start_soon(partial(writer.append, moves, 1, 1, b"1" * 1000, final=True))
                await until(lambda: bus.keys.events(moves) in writer._stuck)
                # By then it has connected wherever it does.
                await writer.append("o", 1, 0, b"x")
                sent.clear()
                for seq in range(1, 50):
                    await writer.append("o", 1, seq, b"x")
                assert bus.keys.events("t") not in sent
                monkeypatch.setattr("tracewire_bus.events.deferred.RETRY_S", 0.0)
                writer._stuck.retry_at = 0.0
                await cluster.finish_move(*halves[1])
                assert len(await rest(bus, moves)) == 2
                assert bus.keys.events("t") in writer._stuck
                await cluster.finish_move(*halves[0])
        assert len(await rest(bus, "t")) == 2


async def test_a_node_that_lost_an_end_is_found_while_something_waits_apart(
    cluster: Cluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is written to it."""
    monkeypatch.setattr("tracewire_bus.events.restore.CHECK_S", 0.1)
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        slot = slot_of(bus.keys, "t")
        await writer.append("t", 1, 0, b"0")
        source, target = await cluster.begin_move(slot)
        other = await elsewhere(cluster, bus, source, target)
        await cluster.move_keys(slot, source, target, but=[bus.keys.events("t").encode()])
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(writer.append, "t", 1, 1, b"1", final=True))
                await until(lambda: bus.keys.events("t") in writer._stuck)
                await writer.append(other, 1, 0, b"0")
                await writer.append(other, 1, 1, b"1", final=True)
                home = await cluster.owner(slot_of(bus.keys, other))
                await home.ask("DEL", bus.keys.events(other))
                await home.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                assert_whole(await rest(bus, other), 1)
                assert bus.keys.events("t") in writer._stuck
                await cluster.finish_move(slot, source, target)
        assert_whole(await rest(bus, "t"), 1)


async def test_a_final_that_is_refused_for_now_stays_in_the_queue(
    cluster: Cluster, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node takes no writes, and the queue's does."""
    async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
        taken = bus.keys.queue("m", "taken")
        home = await cluster.owner(Slots(cluster.url).slot(taken))
        trace = await elsewhere(cluster, bus, home)
        await bus.submit(Submission(trace=trace, model="m", invokes=[Invoke(prompt="x")]))
        await bus.queue.take("m", "e", 1, 1000)
        node = await cluster.owner(slot_of(bus.keys, trace))
        await node.ask("CONFIG", "SET", "min-replicas-to-write", 1)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(writer.append, trace, 1, 0, b"0", final=True, settles=("m", trace, "e")))
                try:
                    await until(lambda: "NOREPLICAS" in caplog.text)
                    assert await bus.command("HGET", taken, trace) == b"e"
                finally:
                    await node.ask("CONFIG", "SET", "min-replicas-to-write", 0)
        assert await bus.command("HGET", taken, trace) is None
        assert_whole(await rest(bus, trace), 0)


async def test_what_waits_for_a_trace_whose_slot_moves_goes_on(cluster: Cluster, prefix: str) -> None:
    """A subscription to a trace that does not begin before, an engine's orders, and its queue."""
    async with Bus.open(cluster.url, prefix=prefix) as bus:
        slot = slot_of(bus.keys, "t")
        control = bus.control("e")
        orders = []
        found: list[Entry] = []

        async def follow() -> None:
            found.extend(await rest(bus, "t"))

        async def obey() -> None:
            while len(orders) < 6:
                orders.extend(await control.read(1000))

        async def take() -> None:
            for number in range(2):
                taken = []
                while not taken:
                    taken = await bus.queue.take("m", "e", 1, 1000)
                assert [one.trace for one in taken] == [f"q{number}"]
                await bus.queue.done("m", f"q{number}")

        await bus.submit(Submission(trace="t", model="other", invokes=[Invoke(prompt="x")], live=pack({"alpha": 0.0})))
        await bus.records.open("t", "e")
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group, bus.writer() as writer:
                for task in (follow, obey, take):
                    group.start_soon(task)
                for number in range(2):
                    for value in range(3):
                        await bus.records.steer("t", live_values({"alpha": float(value)}), by="me")
                    await bus.submit(Submission(trace=f"q{number}", model="m", invokes=[Invoke(prompt="x")]))
                    await cluster.move(slot)
                    await cluster.move(Slots(cluster.url).slot(bus.keys.queue("m", "bell")))
                for seq in range(3):
                    await writer.append("t", 1, seq, b"%d" % seq)
                await writer.append("t", 1, 3, b"3", final=True)
        await control.aclose()
        assert [order.kind for order in orders] == ["steer"] * 6
        assert len({order.change for order in orders}) == 6
        assert_whole(found, 3)


async def test_commands_of_a_slot_are_never_overtaken(cluster: Cluster, prefix: str) -> None:
    """Some of a call's keys have moved already: what can be carried out waits for what cannot."""
    async with linked(cluster) as link:
        one, two = f"{{{prefix}}}one", f"{{{prefix}}}two"
        slot = Slots(cluster.url).slot(one)
        assert await link.execute(("SET", one, 1), ("SET", two, 1)) == [b"OK", b"OK"]
        source, target = await cluster.begin_move(slot)
        await cluster.move_keys(slot, source, target, but=[one.encode()])
        both = Script(text="redis.call('APPEND', KEYS[1], 2) return redis.call('APPEND', KEYS[2], 2)")
        # A script on both keys is refused by both nodes, and what follows it waits for it.
        first, refused, behind = await link.execute(("APPEND", one, 1), both((one, two)), ("APPEND", one, 3))
        assert first == 2
        assert "is being moved" in str(refused)
        assert "is being moved" in str(behind)
        # One by one they are found, wherever they are.
        assert await link.execute(("GET", one), ("GET", two), ("APPEND", two, 3)) == [b"11", b"1", 2]
        await cluster.finish_move(slot, source, target)
        replies = await link.execute(both((one, two)), ("APPEND", one, 3), both((one, two)), ("GET", one), ("GET", two))
        assert replies == [3, 4, 4, b"11232", b"1322"]
        # Nobody knows the script any more.
        for node in cluster.nodes:
            await node.ask("SCRIPT", "FLUSH")
        assert await link.execute(both((one, two)), ("PING",)) == [5, b"PONG"]
        assert (await link.execute(both((one, two)), ("GET", two)))[0] == 6


async def test_what_was_refused_for_a_moment_goes_on_where_it_waits(cluster: Cluster, prefix: str) -> None:
    """Its key is back when it is asked for again: each command has a reply of its own."""
    key = f"{{{prefix}}}control"
    slots = Slots(cluster.url)
    slot = slots.slot(key)
    link = ClusterLink(slots, key)
    try:
        first, second = [await link.execute(("XADD", key, f"{number}-0", "k", "v")) for number in (1, 2)]
        assert (first, second) == ([b"1-0"], [b"2-0"])
        source, target = await cluster.begin_move(slot)
        await cluster.move_keys(slot, source, target)
        (node,) = (node for node in link._nodes.values() if node.connected)
        exchange, replies = node.exchange, []

        async def and_back(*arguments: Any) -> list[Any]:
            said = await exchange(*arguments)
            replies.append(said)
            if len(replies) == 1:
                await source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
                await target.ask("MIGRATE", HOST, source.port, key, 0, 5000)
                await target.ask("CLUSTER", "SETSLOT", slot, "STABLE")
            return said

        node.exchange = and_back  # type: ignore[method-assign]
        trim, wait = ("XTRIM", key, "MINID", "1-1"), ("XREAD", "BLOCK", 1000, "STREAMS", key, "0-0")
        trimmed, read = await link.execute(trim, wait)
        assert [type(reply) for reply in replies[0]] == [AskError] * 2
        assert trimmed == 1
        assert [[id_ for id_, _ in entries] for _, entries in read] == [[b"2-0"]]
    finally:
        await link.drop()


async def test_replies_keep_their_places_and_order_between_slots_is_asked_for(cluster: Cluster, prefix: str) -> None:
    async with linked(cluster) as link:
        names = [f"{prefix}-{number}" for number in range(60)]
        assert await link.execute(*(("SET", name, number) for number, name in enumerate(names))) == [b"OK"] * 60
        replies = await link.execute(("TIME",), *(("GET", name) for name in names), ("EVALSHA", "0" * 40, 1, names[0]))
        assert [int(reply) for reply in replies[1:-1]] == list(range(60))
        assert isinstance(replies[-1], Exception)


async def test_each_role_can_do_its_part_on_a_cluster(cluster: Cluster) -> None:
    rules = RULES / ("users-cluster.acl" if cluster.version[0] >= "7" else "users-cluster-6.2.acl")
    for node in cluster.nodes:
        for line in rules.read_text().splitlines():
            _, name, *rest = line.split()
            await node.ask("ACL", "SETUSER", name, *rest, ">secret")

    def url(role: str) -> str:
        return cluster.url.replace("://", f"://tracewire-{role}:secret@")

    await end_to_end(url("controller"), "tw", follower=url("consumer"), engine=url("engine"))
    async with Bus.open(url("consumer")) as bus, bus.writer() as writer:
        with anyio.fail_after(10):
            with pytest.raises(NotAllowed, match="this user XADD on tw:"):
                await writer.append("t", 1, 1, b"x")
            with pytest.raises(NotAllowed, match="this user a script on tw:"):
                await bus.cancel("t", by="me")


@pytest.mark.parametrize("version", BINARIES)
async def test_a_master_that_dies_is_replaced_by_its_replica(version: str, prefix: str) -> None:
    async with running_servers(version) as servers:
        cluster = await servers.cluster(3, [("cluster-node-timeout", 60_000)])
        async with Bus.open(cluster.url, prefix=prefix) as bus, bus.writer() as writer:
            await writer.append("t", 1, 0, b"0")
            slot = slot_of(bus.keys, "t")
            master = await cluster.owner(slot)
            replica = await cluster.add_replica(servers, master)
            slots = Slots(cluster.url)
            link = ClusterLink(slots)
            names = [f"k{number}" for number in range(100)]
            here = next(name for name in names if (slots.slot(name) * 3 // 16384) == slot * 3 // 16384)
            there = next(name for name in names if (slots.slot(name) * 3 // 16384) != slot * 3 // 16384)
            assert await link.execute(("SET", there, "before"), ("SET", here, "before")) == [b"OK", b"OK"]
            found: list[Entry] = []

            async def follow() -> None:
                found.extend(await rest(bus, "t"))

            async with anyio.create_task_group() as group:
                group.start_soon(follow)
                await writer.append("t", 1, 1, b"1")
                await cluster.caught_up(master, replica)
                master.kill()
                # Nothing that is to come after the rest is done while some of that cannot be.
                with pytest.raises(RedisError):
                    await link.execute(AfterOthers(("SET", there, "after")), ("SET", here, "after"))
                assert await link.execute(("GET", there)) == [b"before"]
                # Only now is it missed.
                for node in (*cluster.nodes, replica):
                    if node is not master:
                        await node.ask("CONFIG", "SET", "cluster-node-timeout", 500)
                await link.drop()
                await writer.append("t", 1, 2, b"2")
                await writer.append("t", 1, 3, b"3", final=True)
            assert_whole(found, 3)
            assert await replica.ask("XLEN", bus.keys.events("t")) == 4


@pytest.mark.parametrize("version", BINARIES)
async def test_what_is_no_cluster_is_said(version: str, prefix: str) -> None:
    async with running_servers(version) as servers:
        plain = await servers.start()
        with pytest.raises(BusError, match="is not a node of a cluster: use a URL with redis://"):
            async with Bus.open(f"redis+cluster://{plain.address}", prefix=prefix):
                pass
        with pytest.raises(BusUnavailable, match="no node of the cluster answers"):
            async with Bus.open(f"redis+cluster://127.0.0.1:{free_port()}", prefix=prefix):
                pass


async def test_a_node_by_its_own_url_is_said(cluster: Cluster, prefix: str) -> None:
    slots = Slots(cluster.url)
    async with Bus.open(f"redis://{cluster.nodes[0].address}", prefix=prefix) as bus:
        for key in map(str, range(20)):
            if await cluster.owner(slots.slot(key)) is not cluster.nodes[0]:
                with pytest.raises(BusError, match=r"use a URL with redis\+cluster://"):
                    await bus.command("GET", key)


async def test_watching_and_trimming_on_a_cluster(cluster: Cluster, prefix: str) -> None:
    """Over streams of many slots; alone, and shared by a group."""
    async with (
        Bus.open(cluster.url, prefix=prefix) as bus,
        bus.watch() as watch,
        bus.watch_group("g", "a") as member,
        bus.writer() as writer,
    ):
        traces = [f"t{number}" for number in range(20)]
        for trace in traces:
            await bus.submit(Submission(trace=trace, model="m", invokes=[Invoke(prompt="x")]))
        with anyio.fail_after(30):
            for one in (watch, member):
                assert sorted([(await anext(one)).trace_id for _ in traces]) == sorted(traces)
        author = Author(bus, writer, "t1")
        await author.begin()
        await author.outputs(5)
        assert await bus.snapshots.take("t1", 1) is not None
        await author.end()
        fold, seen = await read(bus, "t1")
        assert seen[0] == "start>1-5"
        same(fold, author)
        assert await bus.watch_groups.remove("g")
