"""Several adapters of one engine: their entries, EngineCore's addresses, and how they live and end together."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from tests.support.adapter_processes import asks_to_drain, dies, serves
from tests.support.bus_engine import engine_info
from tracewire_engine.launch.adapter_group import AdapterGroup, core_sockets, default_count, follow, front_ends, share

LINK = "ipc:///run/x/link"


class Adapter:
    """The part of an adapter that its group sees."""

    def __init__(self) -> None:
        self.stopping, self.draining = anyio.Event(), anyio.Event()
        self.lost = False

    def stop(self) -> None:
        self.stopping.set()

    def drain(self) -> None:
        self.draining.set()
        self.stopping.set()

    def give_up(self) -> None:
        self.lost = True
        self.stopping.set()


def group_of(*mains: Callable[[Connection], None]) -> AdapterGroup:
    context = multiprocessing.get_context("spawn")
    group = AdapterGroup(lambda *_: None)
    for main in mains:
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs,))
        process.start()
        theirs.close()
        group.processes.append(process)
        group.pipes.append(ours)
    return group


async def ended(group: AdapterGroup, adapter: Adapter, act: Callable[[], None]) -> list[int]:
    """The exit statuses of the processes when `act` was called once all of them served."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.run, adapter)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(60):
            if act is not adapter.give_up:
                await group.wait_serving()
            act()
            await adapter.stopping.wait()
            await group.wait_ended(1.0)
        tasks.cancel_scope.cancel()
    group.end()
    return [process.exitcode for process in group.processes]


@pytest.mark.parametrize(("act", "status"), [("stop", 10), ("drain", 11), ("give_up", 12)])
async def test_what_the_first_adapter_does_all_do(act: str, status: int) -> None:
    adapter = Adapter()
    assert await ended(group_of(serves, serves), adapter, getattr(adapter, act)) == [status, status]


async def test_all_drain_if_one_is_asked_to() -> None:
    adapter = Adapter()
    assert await ended(group_of(asks_to_drain, serves), adapter, lambda: None) == [0, 11]
    assert adapter.draining.is_set()


async def test_an_adapter_thatdies_ends_the_engine() -> None:
    adapter, group = Adapter(), group_of(dies, serves)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.run, adapter)
        with anyio.fail_after(60):
            await adapter.stopping.wait()
            await group.wait_ended(0.0)
        tasks.cancel_scope.cancel()
    assert adapter.lost
    assert [process.exitcode for process in group.processes] == [3, 12]


async def test_an_adapter_follows_the_first() -> None:
    for message, expected in ((b"stop", (False, False)), (b"drain", (False, True)), (b"lost", (True, False))):
        ours, theirs = multiprocessing.Pipe()
        adapter: Any = Adapter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, adapter, theirs)
            ours.send_bytes(message)
            with anyio.fail_after(10):
                await adapter.stopping.wait()
            tasks.cancel_scope.cancel()
        assert (adapter.lost, adapter.draining.is_set()) == expected


async def test_an_adapter_whose_first_is_gone_gives_up() -> None:
    ours, theirs = multiprocessing.Pipe()
    adapter: Any = Adapter()
    ours.close()
    with anyio.fail_after(10):
        await follow(adapter, theirs)
    assert adapter.lost


def test_adapters_share_the_capacity_and_each_has_a_name() -> None:
    info = engine_info()
    info.capacity, info.openai = 8, "http://127.0.0.1:8000/v1"
    shares = [share(info, number, 3) for number in range(3)]
    assert [one.engine for one in shares] == [info.engine, f"{info.engine}.1", f"{info.engine}.2"]
    assert [one.capacity for one in shares] == [3, 3, 2]
    assert [bool(one.openai) for one in shares] == [True, False, False]
    info.capacity = 1
    assert [share(info, number, 3).capacity for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("cores", "gpu", "ray", "images", "count"),
    [
        (12, True, False, False, 3),
        (11, True, False, False, 1),
        (64, False, False, False, 1),
        (64, True, True, False, 1),
        (64, True, False, True, 1),
    ],
)
def test_several_adapters_are_the_default_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, gpu: bool, ray: bool, images: bool, count: int
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: not gpu)
    arguments = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        distributed_executor_backend="ray" if ray else None,
        create_model_config=lambda: SimpleNamespace(is_multimodal_model=images),
    )
    assert default_count(arguments, http=False) == count
    assert default_count(arguments, http=True) == 1
    arguments.tensor_parallel_size = cores
    assert default_count(arguments, http=False) == 1


def test_vllm_starts_its_core_for_all_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported here: the processes of the other tests import this module.
    from vllm.v1.engine import core_client

    found: list[Any] = []
    monkeypatch.setattr(core_client, "launch_core_engines", lambda *arguments: found.append(arguments[3]))
    original: Any = core_client.launch_core_engines
    for count in (1, 3):
        addresses = SimpleNamespace(inputs=["in"], outputs=["out"])
        configurations: list[Any] = []
        with front_ends(LINK, count, configurations.append):
            launch: Any = core_client.launch_core_engines
            launch("config", None, False, addresses)
        assert configurations == ["config"] * (count > 1)
        assert core_client.launch_core_engines is original
        pairs = [core_sockets(LINK, number) for number in range(1, count)]
        assert found.pop().inputs == ["in", *(taken for taken, _ in pairs)]
        assert addresses.outputs == ["out", *(given for _, given in pairs)]
