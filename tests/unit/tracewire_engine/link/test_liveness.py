"""A worker and its adapter on different machines notice each other's end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlencode

import anyio

from tests.support.far_link import PATIENCE, adapter, ended, reports, worker
from tests.support.network import wire
from tracewire_engine.link.liveness import HeartbeatReceiver
from tracewire_engine.link.step_link import LinkReceiver


async def test_a_worker_ends_with_its_adapter() -> None:
    """A connection that comes back would have lost what was under way."""
    with ExitStack() as stack:
        ends = stack.enter_context(adapter())
        process = stack.enter_context(worker(ends.address))
        await reports(ends.link, 1)
        ends.link.close()
        assert "connection to the adapter (link) ended" in await ended(process)


@asynccontextmanager
async def wired(address: str) -> AsyncIterator[tuple[str, Any]]:
    """The address by a way on which nothing passes when it is told so, for the pulse."""
    base, _, parameters = address.partition("?")
    values = {name: found[0] for name, found in parse_qs(parameters).items()}
    async with wire(int(values["pulse"]), Random(0)) as way:
        values["pulse"] = re.findall(r":(\d+)$", way.url)[0]
        yield f"{base}?{urlencode(values)}", way


async def test_silence_ends_both() -> None:
    """A cable that is cut: no connection breaks, and nothing arrives."""
    lost: list[str] = []
    told = threading.Event()

    def on_loss(why: str) -> None:
        lost.append(why)
        told.set()

    with adapter(patience_s=2.0) as ends:
        ends.pulse.on_loss(on_loss)
        async with wired(ends.address) as (address, way):
            with worker(address, patience_s=2.0) as process:
                await reports(ends.link, 1)
                # It lives for longer than that while it is heard.
                with anyio.move_on_after(4):
                    await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
                assert process.poll() is None
                assert not lost
                assert way.hold(True, True) == 1
                assert "has not answered for 2 s" in await ended(process)
            assert await anyio.to_thread.run_sync(told.wait, 30)
            assert lost == ["no heartbeat came for 2 s from the far worker"]


def test_a_poll_that_was_wrong_stops_no_pulse() -> None:
    """A connection that is being let in can look like a message: who waits for that one hears nobody any more."""
    lost = threading.Event()
    with LinkReceiver("127.0.0.1") as link:
        receiver = HeartbeatReceiver(link.address, link.guard, patience_s=1.0)
        plain, polled = receiver._socket, threading.Event()

        class Spurious:
            def poll(self, timeout: int) -> int:
                polled.set()
                time.sleep(0.001)
                return 1

            def __getattr__(self, name: str) -> Any:
                return getattr(plain, name)

        receiver._socket = Spurious()  # type: ignore[assignment]
        receiver.on_loss(lambda why: lost.set())
        assert polled.wait(PATIENCE)
        closing = threading.Thread(target=receiver.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()
