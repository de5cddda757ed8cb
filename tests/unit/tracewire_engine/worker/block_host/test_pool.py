"""Hosts that are started ahead of need, and ended."""

from __future__ import annotations

import select

import pytest

from tests.support.hosted_model import Model, settings_of
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
