"""What a server came back without is appended again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.redis.durable import Server, server
from tests.support.redis_loss import _settled
from tests.support.until import until
from tracewire_bus import recovery
from tracewire_bus.bus import Bus, Fenced
from tracewire_bus.events import restore
from tracewire_bus.store.lifecycle import lifecycle_fields
from tracewire_bus.wire.ids import FINAL_ID
from tracewire_bus.wire.messages import Invoke, Submission


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a while waits less."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    monkeypatch.setattr(restore, "CHECK_S", 0.05)
    monkeypatch.setattr("tracewire.traces.presence.GUARD_POLL_S", 0.05)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Server]:
    """A server with a log that is on the disk every second."""
    async with server(tmp_path / "redis") as one:
        yield one


@pytest.mark.usefixtures("_soon")
async def test_what_others_wrote_to_a_server_that_came_back_stays(redis: Server) -> None:
    async with Bus.open(redis.url) as bus, bus.writer() as writer:
        since = redis.written
        for trace in ("same", "other", "newer", "ended"):
            for seq in range(5):
                await writer.append(trace, 1, seq, b"mine %d" % seq)
        await writer.append("ended", 1, 5, b"the end", final=True)
        redis.kill()
        redis.forget(since)
        # Whoever writes first is heard: we are not connected again before it is there.
        preload = Server(redis.folder, socket="other.sock")
        await preload.start()
        async with Bus.open(preload.url) as others:
            for trace, id_, data in (
                ("same", "1-0", b"mine 0"),
                ("other", "1-1", b"theirs"),
                ("newer", "2-0", b"theirs"),
                ("ended", "1-0", b"mine 0"),
            ):
                await others.command("XADD", bus.keys.events(trace), id_, "v", "1.0", "d", data)
        await preload.aclose()
        await redis.start()
        await writer.append("same", 1, 5, b"mine 5")
        for trace in ("other", "newer"):
            with pytest.raises(Fenced):
                await writer.append(trace, 1, 5, b"mine 5")

        async def data(trace: str) -> list[bytes]:
            return [flat[3] for _, flat in await bus.command("XRANGE", bus.keys.events(trace), "-", "+")]

        mine = [b"mine %d" % seq for seq in range(6)]
        assert await data("same") == mine
        assert await data("ended") == [*mine[:5], b"the end"]
        assert await data("other") == [b"theirs"]
        assert await data("newer") == [b"theirs"]
        # The next attempt is ours again.
        await writer.append("other", 2, 0, b"again")
        assert 0 < await bus.command("TTL", bus.keys.events("ended")) <= 3600


@pytest.mark.usefixtures("_soon")
async def test_what_is_appended_again_is_told_once(redis: Server) -> None:
    """The firehose hears of what was lost with the event, and not again of what was not."""
    async with Bus.open(redis.url) as bus, bus.writer() as writer:
        all_of_it = "XRANGE", bus.keys.firehose(bus.keys.tag("t")), "-", "+"

        async def told() -> list[tuple[bytes, bytes]]:
            entries = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in await bus.command(*all_of_it)]
            return [(entry[b"k"], entry[b"c"]) for entry in entries]

        async def appended_again(lost: int, last: str) -> None:
            opened = writer.restorer.link.opened
            await redis.lose(lost)
            await until(lambda: writer.restorer.restored == writer.restorer.link.opened > opened)
            assert await bus.tail_id("t") == last

        await bus.submit(Submission(trace="t", model="m", invokes=[Invoke(prompt="x")], client="me"))
        await bus.records.open("t", "e", 1)
        await writer.append(
            "t", 1, 0, b"begun", lifecycle=lifecycle_fields("accepted", "t", model="m", engine="e", attempt=1)
        )
        since = redis.written
        await writer.append(
            "t", 1, 1, b"held", lifecycle=lifecycle_fields("paused", "t", model="m", engine="e", attempt=1)
        )
        await writer.append("t", 1, 2, b"output")
        # Nothing, some of it, and the end.
        everything = [(b"queued", b"me"), (b"accepted", b"me"), (b"paused", b"me")]
        for lost in (redis.written, since, since):
            await appended_again(lost, "1-2")
            assert await told() == everything
        since = redis.written
        life = lifecycle_fields("final", "t", model="m", engine="e", attempt=1, status="finished")
        await writer.append("t", 1, 3, b"end", final=True, lifecycle=life)
        for _ in range(2):
            await appended_again(since, FINAL_ID)
            assert await told() == [*everything, (b"final", b"me")]
            assert 0 < await bus.command("TTL", bus.keys.events("t")) <= 3600


@pytest.mark.usefixtures("_soon")
async def test_an_end_is_settled_again_and_its_large_values_are_there(redis: Server) -> None:
    import numpy as np

    async with Bus.open(redis.url) as bus, bus.writer() as writer:
        await bus.queue.put("tiny", "t", b"d")
        assert len(await bus.queue.take("tiny", "e", 1, 0)) == 1
        since = redis.written
        ref = await bus.blobs.store("t", np.arange(300_000, dtype="float64"))
        await writer.append("t", 1, 0, b"begun")
        await writer.append("t", 1, 1, b"x" * 100_000, final=True, settles=("tiny", "t", "e"))
        assert await _settled(bus)
        await redis.lose(since)
        await until(lambda: _settled(bus))
        assert await bus.tail_id("t") == FINAL_ID
        assert (await bus.blobs.load("t", ref))[-1] == 299_999
        assert 0 < await bus.command("TTL", bus.keys.blobs("t")) <= 3600
