"""Hosts that are started ahead of need, and ended."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosted_model import HostedModel, Model, settings_of
from tracewire_engine.worker.block_host import pool as pool_module
from tracewire_engine.worker.block_host.pool import HostPool


def test_hosts_are_started_ahead_and_end_at_once() -> None:
    pool = HostPool(settings_of(Model(1)), spare=2)
    pool.ahead()
    hosts = [pool.take() for _ in range(3)]
    assert len({host.pid for host in hosts}) == 3
    assert all(host.alive() for host in hosts)
    hosts[0].kill()
    poll = select.poll()
    poll.register(hosts[0]._process, select.POLLIN)
    assert poll.poll(30_000)
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


def test_a_pool_that_is_closed_keeps_no_descriptor_of_hosts_that_wait() -> None:
    gc.collect()
    before = descriptors()
    pool = HostPool(settings_of(Model(1)), spare=2)
    pool.ahead()
    pool.take().close()
    pool.close()
    gc.collect()
    assert descriptors() == before


def descriptors() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


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


#: The server of hosts, of which the third fork fails, or is of a host that ends at once.
SERVER = """
import os, signal, sys, time
forks, fork, how = 0, os.fork, sys.argv.pop(1)
def forked():
    global forks
    forks += 1
    if forks == 3 and how == "fails":
        raise BlockingIOError(11, "Resource temporarily unavailable")
    child = fork()
    if child and forks == 3:
        os.kill(child, signal.SIGKILL)
        time.sleep(0.2)
    return child
os.fork = forked
from tracewire_engine.block_host.server import main
main()
"""


@pytest.mark.parametrize("how", ["fails", "ends"])
def test_a_host_that_cannot_be_started_costs_its_trace_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", SERVER, how, command[-1]], **options)

    monkeypatch.setattr(pool_module.subprocess, "Popen", started)
    pool = HostPool(settings_of(Model(1)), spare=0)
    first = [pool.take(), pool.take()]
    gc.collect()
    before = descriptors()
    with pytest.raises(OSError, match=r"no host of blocks could be started \(.*\); submit the trace again"):
        pool.take()
    gc.collect()
    assert descriptors() == before
    later = pool.take()
    assert all(host.alive() for host in (*first, later))
    for host in (*first, later):
        host.close()
    pool.close()


@pytest.mark.parametrize(("call", "works"), [("socketpair", 1), ("memfd_create", 1), ("memfd_create", 2), ("pipe2", 0)])
def test_a_host_for_which_there_are_no_descriptors_leaves_none_open(
    call: str, works: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its start has come to. One that is at hand is given all the same."""
    pool = HostPool(settings_of(Model(1)), spare=1)
    pool.ahead()
    module = socket if call == "socketpair" else os
    real, left = getattr(module, call), works

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(24, "Too many open files")
        return real(*arguments, **options)

    pool.wait_ready()
    gc.collect()
    before = descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(module, call, fails)
        with pytest.raises(OSError, match="Too many open files"):
            pool_module._Ends()
        gc.collect()
        assert descriptors() == before
        left = works
        host = pool.take()
        assert host.alive()
    host.close()
    pool.close()


def test_saves_go_through_a_process_and_when_it_is_killed_another_one_takes_new_hosts() -> None:
    model = HostedModel(adapter_link=True)
    source = "import math\nkept = [].save()\nfor _ in tracer.iter[:]:\n    kept.append(model.logits.clone())\n"
    outcome = model.run({"one": source}, steps=3)["one"]
    assert [step.index for step in outcome.steps] == [0, 1, 2]
    assert len(outcome.saves["kept"]) == 3
    (relay,) = [one for one in psutil.Process(model.pool._server.pid).children() if name_of(one) == "tw-saves"]
    model.open("two", source)
    model.step({"two": 2}, 0)
    model.wait_for_step("two")
    relay.kill()
    relay.wait()
    # The worker learns of it between steps.
    model.step({"two": 1}, 1)
    model.finish("two", 2)
    model.wait("two")
    finish = model.outcomes["two"].finish
    assert finish is not None
    assert finish.error is not None
    assert (finish.error.type, finish.restart) == ("BlockHostLost", True)
    again = model.run({"three": source}, steps=3)["three"]
    assert len(again.saves["kept"]) == 3
    model.close()


def test_the_relay_keeps_nothing_of_hosts_that_are_closed() -> None:
    model = HostedModel(adapter_link=True)
    source = "import math\nkept = model.logits.clone().save()\n"
    model.run({"first": source}, steps=1)
    (relay,) = [one for one in psutil.Process(model.pool._server.pid).children() if name_of(one) == "tw-saves"]
    before = relay.num_fds()
    for number in range(6):
        model.run({f"{number}.{one}": source for one in range(2)}, steps=1)
    model.run({"last": source}, steps=1)
    # Those of one host may still be open: the worker does not wait until the relay has closed them.
    assert relay.num_fds() <= before + 4
    model.close()


def name_of(process: psutil.Process) -> str:
    """Its name, or an empty one if it has ended."""
    try:
        return (Path("/proc") / str(process.pid) / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
