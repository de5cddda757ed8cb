"""What the bus's tasks wait by, and the URLs that name several servers."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tracewire_bus.addresses import Addresses
from tracewire_bus.connection import Wakeup, redacted


async def test_a_wakeup_wakes_whoever_waits_then_and_nobody_later() -> None:
    wakeup = Wakeup()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await wakeup.wait()
        woken.append(number)

    wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 1)
        await checkpoint()
        assert woken == []
        wakeup.notify()
        wakeup.notify()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, 2)
        await checkpoint()
        assert woken == [1]
        group.cancel_scope.cancel()
    async with anyio.create_task_group() as group:
        # One that was cancelled left nothing behind.
        group.start_soon(wait, 3)
        await checkpoint()
        wakeup.notify()
    assert woken == [1, 3]


async def test_a_wakeup_whose_task_is_cancelled_at_the_same_time_is_not_an_error() -> None:
    wakeup = Wakeup()
    async with anyio.create_task_group() as group:
        group.start_soon(wakeup.wait)
        await checkpoint()
        group.cancel_scope.cancel()
        wakeup.notify()
        await checkpoint()
        wakeup.notify()


def test_a_url_of_several_servers() -> None:
    secret = (
        "rediss+sentinel://me:geheim@one,[::1]:7000/s?db=2&ssl_ca_certs=/ca&sentinel_username=u&sentinel_password=p"
    )
    parsed = Addresses(secret, 26379)
    assert parsed.servers == [("one", 26379), ("::1", 7000)]
    assert parsed.path == "s"
    assert parsed.url("h", 1) == "rediss://me:geheim@h:1?db=2&ssl_ca_certs=%2Fca"
    assert parsed.sentinel_url("::1", 1) == "rediss://[::1]:1?ssl_ca_certs=%2Fca&username=u&password=p"
    shown = redacted(secret)
    assert "geheim" not in shown
    assert "sentinel_password=***" in shown
    for bad in ("redis+sentinel://one,,two/s", "redis+sentinel:///s", "redis+sentinel://one:port/s"):
        with pytest.raises(ValueError, match=r"between the commas|[Pp]ort"):
            Addresses(bad, 26379)
