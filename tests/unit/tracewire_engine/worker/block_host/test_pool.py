"""Hosts that are started ahead of need, and ended."""

from __future__ import annotations

import select

import psutil
import pytest

from tests.support.hosted_model import Model, settings_of
from tracewire_engine.worker.block_host import pool as pool_module
from tracewire_engine.worker.block_host.pool import HostPool


def test_hosts_are_started_ahead_and_end_at_once() -> None:
    pool = HostPool(settings_of(Model(1)), spare=2)
    pool.ahead()
    hosts = [pool.take() for _ in range(3)]
    assert len({host.pid for host in hosts}) == 3
    assert all(host.alive() for host in hosts)
    hosts[0].kill()
    assert select.select([hosts[0]._process], [], [], 30)[0]
    assert not hosts[0].alive()
    hosts[0].kill()
    for host in hosts:
        host.close()
        host.close()
        host.kill()
    assert not hosts[1].alive()
    pool.close()
    with pytest.raises(OSError, match=r"ended|Bad file"):
        pool.take()


def test_the_model_waits_for_a_host_for_a_few_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FORK_S", 0.2)
    pool = HostPool(settings_of(Model(1)), spare=0)
    pool.wait_ready()
    server = psutil.Process(pool._server.pid)
    server.suspend()
    with pytest.raises(TimeoutError, match=r"no host of blocks was started within 0\.2 s"):
        pool.take()
    # The one that comes late is the next trace's.
    server.resume()
    pool._control.settimeout(60)
    late = pool.take()
    assert late.alive()
    assert not pool._starting
    late.close()
    pool.close()
