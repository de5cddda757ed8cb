"""Large variables on a machine that cannot see the adapter's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tests.support.far_link import PATIENCE
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Block, Invoke, Submission
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter.large_inputs import Inputs
from tracewire_engine.protocol.input_files import input_path
from tracewire_engine.worker.remote_inputs import RemoteInputs
from tracewire_engine.worker.tensors import to_tensors


class Carried:
    """A carrier to one worker's memory."""

    def __init__(self) -> None:
        self.held = RemoteInputs()
        self.calls: list[str] = []

    async def carry(self, path: Path) -> None:
        """In two pieces."""
        self.calls.append("carry")
        data = await anyio.Path(path).read_bytes()
        self.held.write(path.name, 0, data[:1000])
        self.held.write(path.name, 1000, data[1000:])

    async def drop(self, path: Path) -> None:
        """Forget it."""
        self.calls.append("drop")
        self.held.drop(path.name)


async def test_large_variables_are_carried(bus: Bus, tmp_path: Path) -> None:
    """Once for all traces that have them, until the last has ended."""
    value = np.random.default_rng(0).random((1000, 300), dtype=np.float32)
    refs = {trace: await bus.blobs.store(trace, value, "w") for trace in "ab"}
    carrier = Carried()
    inputs = Inputs(bus.blobs, tmp_path, carrier)

    def submission(trace: str) -> Submission:
        block = Block(name="b", source="pass", variables=pack({"w": refs[trace]}))
        return Submission(trace=trace, model="demo", invokes=[Invoke(prompt="x")], block=block, live=pack({}))

    async with inputs.of(submission("a")):
        async with inputs.of(submission("b")):
            assert carrier.calls == ["carry"]
            first, second = (to_tensors(refs[trace], torch.device("cpu"), carrier.held) for trace in "ab")
            first.add_(1)
            assert equal(second, value)
        assert carrier.calls == ["carry"]
    assert carrier.calls == ["carry", "drop"]
    # What is mapped stays.
    assert equal(first, value + 1)
    assert not input_path(carrier.held, refs["a"]).exists()


def _with(ref: Any, trace: str) -> Submission:
    block = Block(name="b", source="pass", variables=pack({"w": ref}))
    return Submission(trace=trace, model="demo", invokes=[Invoke(prompt="x")], block=block, live=pack({}))


async def test_a_large_variable_of_which_a_part_arrived_is_carried_anew(bus: Bus, tmp_path: Path) -> None:
    """The first trace was cancelled on its way; the second waited for the same file."""
    value = np.random.default_rng(0).random((1000, 300), dtype=np.float32)
    ref = await bus.blobs.store("a", value, "w")
    own = await bus.blobs.store("b", value, "w")
    half_way = anyio.Event()

    class Interrupted(Carried):
        async def carry(self, path: Path) -> None:
            if not self.calls:
                self.calls.append("half")
                self.held.write(path.name, 0, (await anyio.Path(path).read_bytes())[:1000])
                half_way.set()
                await anyio.sleep_forever()
            await super().carry(path)

    carrier = Interrupted()
    inputs = Inputs(bus.blobs, tmp_path, carrier)
    first = anyio.CancelScope()
    done = anyio.Event()

    async def cancelled() -> None:
        with first:
            async with inputs.of(_with(ref, "a")):
                pass

    async def second() -> None:
        async with inputs.of(_with(own, "b")):
            assert equal(to_tensors(own, torch.device("cpu"), carrier.held), value)
        done.set()

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(cancelled)
            await half_way.wait()
            group.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            await done.wait()
    assert carrier.calls == ["half", "carry", "drop"]


async def test_workers_that_hang_keep_no_adapter_from_leaving(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a file on its way, nor with one to be forgotten."""
    monkeypatch.setattr("tracewire_engine.adapter.shared_file.DROP_S", 0.05)
    ref = await bus.blobs.store("a", np.zeros(100_000), "w")
    carrying = anyio.Event()

    class Hanging(Carried):
        async def carry(self, path: Path) -> None:
            carrying.set()
            await anyio.sleep_forever()

        async def drop(self, path: Path) -> None:
            await anyio.sleep_forever()

    inputs = Inputs(bus.blobs, tmp_path, Hanging())
    scope = anyio.CancelScope()

    async def held() -> None:
        with scope:
            async with inputs.of(_with(ref, "a")):
                raise AssertionError("it was not carried")

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(held)
            await carrying.wait()
            scope.cancel()
