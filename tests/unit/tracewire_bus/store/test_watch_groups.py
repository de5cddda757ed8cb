"""Groups of readers share the lifecycle of all traces; what one leaves goes to another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import tracewire
from tests.support.lost_replies import losing
from tests.support.scripted_engine import acts, serving
from tests.support.stepping import PATIENCE, free
from tests.support.suspects import _submission
from tests.support.until import until
from tracewire_bus.bus import Bus
from tracewire_bus.store import watch_groups
from tracewire_bus.store.lifecycle import Lifecycle, Watch
from tracewire_bus.store.watch_groups import GroupRemoved, GroupWatch
from tracewire_bus.transport.errors import BusError
from tracewire_bus.wire.messages import Invoke, Submission


def submission(trace: str, model: str = "m", **more: object) -> Submission:
    return Submission(trace=trace, model=model, invokes=[Invoke(prompt="x")], client="me", **more)  # type: ignore[arg-type]


async def some(watch: Watch | GroupWatch, count: int) -> list[Lifecycle]:
    """The next so many events."""
    with anyio.fail_after(30):
        return [await anext(watch) for _ in range(count)]


async def test_the_members_of_a_group_share_the_events(bus: Bus) -> None:
    traces = [f"t{number}" for number in range(200)]
    seen: dict[str, list[str]] = {"a": [], "b": [], "c": []}

    async def follow(name: str) -> None:
        async with bus.watch_group("g", name, since="start", idle_s=1000) as member:
            async for event in member:
                seen[name].append(event.trace_id)
                if sum(map(len, seen.values())) >= 200:
                    group.cancel_scope.cancel()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for name in seen:
                group.start_soon(follow, name)
            for trace in traces:
                await bus.submit(submission(trace))
    assert sorted(trace for found in seen.values() for trace in found) == sorted(traces)
    assert sum(map(bool, seen.values())) > 1


async def test_what_was_not_acknowledged_comes_again_under_the_same_name(bus: Bus) -> None:
    for number in range(10):
        await bus.submit(submission(f"t{number}"))
    first = bus.watch_group("g", "a", since="start", idle_s=1000)
    before = [event.trace_id for event in await some(first, 4)]
    # As if it had been killed.
    await first._link.drop()
    async with bus.watch_group("g", "a", since="now", idle_s=1000) as second:
        after = [event.trace_id for event in await some(second, 7)]
    # The last one had been handed out, and nobody asked for the next.
    assert sorted(before[:3] + after) == sorted(f"t{number}" for number in range(10))
    assert before[3] in after


async def test_what_a_member_leaves_goes_to_the_others_soon(bus: Bus) -> None:
    for number in range(20):
        await bus.submit(submission(f"t{number}"))
    async with bus.watch_group("g", "a", since="start", idle_s=5) as first:
        before = [event.trace_id for event in await some(first, 2)]
    async with bus.watch_group("g", "b", idle_s=5) as second:
        after = [event.trace_id for event in await some(second, 19)]
    assert sorted(before[:1] + after) == sorted(f"t{number}" for number in range(20))


async def test_a_group_goes_on_when_its_streams_have_expired(bus: Bus) -> None:
    async with bus.watch_group("g", "a") as member:
        await bus.submit(submission("one"))
        assert [event.trace_id for event in await some(member, 1)] == ["one"]
        await bus.command("DEL", *(bus.keys.firehose(tag) for tag in bus.keys.tags))
        await bus.submit(submission("two"))
        assert [event.trace_id for event in await some(member, 1)] == ["two"]
    # Somebody who was away when they expired.
    await bus.command("DEL", *(bus.keys.firehose(tag) for tag in bus.keys.tags))
    await bus.submit(submission("three"))
    async with bus.watch_group("g", "b") as member:
        assert [event.trace_id for event in await some(member, 1)] == ["three"]


async def test_groups_are_listed_and_removed(bus: Bus) -> None:
    async with bus.watch_group("g", "a") as member, bus.watch_group("h", "a"):
        assert await bus.watch_groups.names() == ["g", "h"]
        assert await bus.watch_groups.remove("g")
        assert not await bus.watch_groups.remove("g")
        assert await bus.watch_groups.names() == ["h"]
        with pytest.raises(GroupRemoved), anyio.fail_after(30):
            await anext(member)
    for arguments in (("", "a"), ("g", ""), ("g", "a", "nonsense"), ("g", "a", "now", 0.0)):
        with pytest.raises(ValueError, match=r"group|watch"):
            bus.watch_group(*arguments)  # type: ignore[arg-type]
    await bus.command("SET", bus.keys.firehose("t0"), "no stream")
    with pytest.raises(BusError, match="WRONGTYPE"), anyio.fail_after(30):
        await anext(bus.watch("start"))


MEMBER = """
import asyncio, sys, tracewire

async def main(url, prefix, name, idle):
    async with tracewire.connect(url, prefix=prefix) as client:
        async with client.watch(group="g", consumer=name, since="start", idle_timeout=float(idle)) as watch:
            print("ready", flush=True)
            count = 0
            async for event in watch:
                print(event.trace_id, event.type, flush=True)
                count += 1
                if count == 3:
                    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_what_a_killed_member_had_goes_to_another(bus: Bus, embedded: str, prefix: str) -> None:
    """Each event is handled by somebody, and twice only what was in the killed one's hands."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    async with tracewire.connect(embedded, prefix=prefix) as client, serving(bus, free()):
        await client.models.get("tiny", timeout=PATIENCE)
        wanted = set()
        for _ in range(30):
            async with client.trace("tiny", "hello", acts, max_tokens=2) as trace:
                await trace.result()
            wanted |= {(trace.id, kind) for kind in ("queued", "accepted", "final")}
        doomed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MEMBER, embedded, prefix, "doomed", "0.2"),
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert doomed.stdout is not None
        with anyio.fail_after(60):
            assert await doomed.stdout.readline() == b"ready\n"
            # It has read many at once, and handles them one by one.
            first = [(await doomed.stdout.readline()).decode().split() for _ in range(3)]
            doomed.send_signal(signal.SIGKILL)
            await doomed.wait()
        handled = {(trace, kind) for trace, kind in first}
        again = 0
        async with client.watch(group="g", consumer="heir", idle_timeout=0.2) as watch:
            with anyio.fail_after(60):
                while handled != wanted:
                    event = await anext(watch)
                    again += (event.trace_id, event.type) in handled
                    handled.add((event.trace_id, event.type))
        # The one that it had not asked past.
        assert again == 1


async def test_a_watch_group_that_was_removed_was_there(bus: Bus, tmp_path: Path) -> None:
    await bus.command("HSET", bus.keys.watch_groups(), "g", "1")
    async with losing(bus, tmp_path, "HDEL") as (far, _):
        assert await far.watch_groups.remove("g")
        assert not await far.watch_groups.remove("g")


async def test_readers_of_a_group_are_forgotten_when_they_leave_or_fall_silent(bus: Bus) -> None:
    """One that leaves, one that was killed, and not one that holds something."""

    async def readers() -> set[bytes]:
        found = set()
        for tag in bus.keys.tags:
            for flat in await bus.command("XINFO", "CONSUMERS", bus.keys.firehose(tag), "g"):
                found.add(dict(zip(flat[::2], flat[1::2], strict=True))[b"name"])
        return found

    watching = partial(bus.watch_group, "g", since="start")
    async with watching("stays", idle_s=0.05) as stays, anyio.create_task_group() as group:

        async def read(watch: Any) -> None:
            async for _ in watch:
                pass

        leaves, killed, holds = watching("leaves"), watching("killed"), watching("holds")
        await holds.start()
        await bus.submit(_submission("t"))
        assert (await anext(holds)).type == "queued"
        for watch, name in ((leaves, b"leaves"), (killed, b"killed")):
            async with anyio.create_task_group() as reading:
                reading.start_soon(read, watch)
                await until(partial(_is_among, name, readers))
                reading.cancel_scope.cancel()
        assert {b"leaves", b"killed", b"holds"} <= await readers()
        await leaves.aclose()
        assert b"leaves" not in await readers()
        await killed._link.drop()
        await holds.aclose()
        # It hands over what it holds, and is known until somebody has that.
        assert b"holds" in await readers()
        group.start_soon(read, stays)
        await until(lambda: _are(readers, {b"stays"}))
        group.cancel_scope.cancel()


async def _is_among(name: bytes, readers: Any) -> bool:
    return name in await readers()


async def _are(readers: Any, names: set[bytes]) -> bool:
    return bool(await readers() == names)


async def test_a_kept_entry_stays_while_its_reader_reads_on(bus: Bus) -> None:
    """It comes to no other reader, nor a second time to its own, until it is acknowledged."""
    for number in range(6):
        await bus.submit(submission(f"t{number}"))
    async with (
        bus.watch_group("g", "a", since="start", idle_s=1.2) as first,
        bus.watch_group("g", "b", idle_s=1.2) as second,
    ):
        kept = {}
        for event in await some_kept(first, 6, kept):
            assert first.is_kept(kept[event.trace_id])
        with pytest.raises(ValueError, match="keep: expected to be called once"):
            first.keep()
        others: list[str] = []

        async def read(member: GroupWatch) -> None:
            while True:
                others.append((await anext(member)).trace_id)

        async with anyio.create_task_group() as group:
            group.start_soon(read, first)
            group.start_soon(read, second)
            # The time after which the second takes over what nobody renews, several times over.
            seen: set[float] = set()
            await until(lambda: seen.add(first._renewed_at) or len(seen) > 8)
            await bus.submit(submission("new"))
            await until(lambda: others)
            group.cancel_scope.cancel()
        assert others == ["new"]
        for place in kept.values():
            await first.acknowledge(place)
            assert not first.is_kept(place)
        pending = [await bus.command("XPENDING", name, "g") for name in first._names]
        assert not any(found[0] for found in pending)


async def some_kept(watch: GroupWatch, count: int, kept: dict[str, Any]) -> list[Lifecycle]:
    """The next so many events, each of which is kept."""
    events = []
    for _ in range(count):
        (event,) = await some(watch, 1)
        kept[event.trace_id] = watch.keep()
        events.append(event)
    return events


async def test_what_a_dead_reader_kept_goes_to_another(bus: Bus) -> None:
    for number in range(4):
        await bus.submit(submission(f"t{number}"))
    kept: dict[str, Any] = {}
    first = bus.watch_group("g", "a", since="start", idle_s=0.3)
    await some_kept(first, 4, kept)
    # As if it had been killed.
    await first._link.drop()
    async with bus.watch_group("g", "b", idle_s=0.3) as second:
        assert sorted(event.trace_id for event in await some(second, 4)) == sorted(kept)
    # It hangs no longer: it knows that others have its entries.
    await first._renew(anyio.current_time() + 1)
    assert not any(map(first.is_kept, kept.values()))


async def test_a_reader_that_closes_leaves_what_it_kept(bus: Bus) -> None:
    await bus.submit(submission("t"))
    async with bus.watch_group("g", "a", since="start", idle_s=100) as first:
        await some_kept(first, 1, {})
    async with bus.watch_group("g", "b", idle_s=100) as second:
        assert [event.trace_id for event in await some(second, 1)] == ["t"]


async def test_more_kept_entries_than_a_page_hide_no_other(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_groups, "PAGE", 2)
    # All on one stream.
    tag = bus.keys.tag("t0")
    names = [name for name in (f"t{number}" for number in range(2000)) if bus.keys.tag(name) == tag][:9]
    for name in names[:8]:
        await bus.submit(submission(name))
    first = bus.watch_group("g", "a", since="start", idle_s=1000)
    kept: dict[str, Any] = {}
    await some_kept(first, 7, kept)
    (last,) = await some(first, 1)
    # The connection breaks: it reads again what is its own.
    await first._link.drop()
    first._buffer.clear()
    first._reread, first._current = True, None
    assert [event.trace_id for event in await some(first, 1)] == [last.trace_id]
    await bus.submit(submission(names[8]))
    assert [event.trace_id for event in await some(first, 1)] == [names[8]]
    await first.aclose()
