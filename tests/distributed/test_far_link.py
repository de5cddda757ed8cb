"""The link to workers on other machines: what it carries, who may use it, and what either end does without the other.

The worker is a process that has only the address, as it would on another machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

import anyio
import msgspec
import numpy as np
import pytest
import torch
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from tests.support.equality import equal
from tests.support.network import wire
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Block, Invoke, Submission
from tracewire_bus.wire.packing import pack
from tracewire_engine.adapter.large_inputs import Inputs
from tracewire_engine.link.addresses import Guard, endpoint
from tracewire_engine.link.blob_receiver import BlobChunk, BlobReceiver
from tracewire_engine.link.liveness import HeartbeatReceiver
from tracewire_engine.link.step_link import LinkReceiver
from tracewire_engine.protocol.input_files import input_path
from tracewire_engine.protocol.messages import Report, StepRecord
from tracewire_engine.worker.remote_inputs import RemoteInputs, inputs_at
from tracewire_engine.worker.tensors import to_tensors

#: What a handshake that was refused looks like to who tried it.
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

PATIENCE = 30


class Ends(NamedTuple):
    """The adapter's ends."""

    link: LinkReceiver
    blobs: BlobReceiver
    pulse: HeartbeatReceiver
    address: str


@contextmanager
def adapter(patience_s: float = 30.0) -> Iterator[Ends]:
    """The adapter's ends, as `tracewire engine` opens them for a cluster."""
    with ExitStack() as stack:
        link = stack.enter_context(LinkReceiver("127.0.0.1"))
        blobs = stack.enter_context(BlobReceiver(link.address, link.guard))
        pulse = stack.enter_context(HeartbeatReceiver(blobs.address, link.guard, patience_s))
        yield Ends(link, blobs, pulse, pulse.address)


@contextmanager
def worker(address: str, patience_s: float = 30.0) -> Iterator[subprocess.Popen[str]]:
    """A worker that has sent its first messages; each line that it is given makes it send a report."""
    command = [sys.executable, "-m", "tests.support.parallel.far_worker", address, str(patience_s)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def reports(link: LinkReceiver, count: int) -> list[Report]:
    found: list[Report] = []
    with anyio.fail_after(60):
        while len(found) < count:
            await link.arrived()
            found += link.ready()
    return found


async def ended(process: subprocess.Popen[str]) -> str:
    """What a worker said at its end."""
    with anyio.fail_after(60):
        _, said = await anyio.to_thread.run_sync(process.communicate)
    assert process.returncode == -9
    return said


async def test_it_carries_reports_and_large_arrays() -> None:
    with adapter() as ends, worker(ends.address) as process:
        assert [report.time for report in await reports(ends.link, 1)] == [0.0]
        items = ends.blobs.items()
        with anyio.fail_after(60):
            chunk, record = [await anext(items) for _ in range(2)]
        assert isinstance(chunk, BlobChunk)
        assert np.frombuffer(chunk.data, np.float32).tolist() == list(range(1000))
        assert isinstance(record, Report)
        assert [step.request for step in record.steps] == ["large"]
        assert process.stdin is not None
        process.stdin.write("\n\n")
        process.stdin.flush()
        assert [report.time for report in await reports(ends.link, 2)] == [1.0, 2.0]


def stranger(
    context: zmq.Context[Any], at: str, keys: dict[str, str] | None
) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    """A socket that tries to get in, and its monitor."""
    socket = context.socket(zmq.DEALER if "pulse" in at else zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        socket.curve_serverkey = z85.encode(bytes.fromhex(keys["server"]))
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        if "secret" in keys:
            socket.curve_secretkey = z85.encode(bytes.fromhex(keys["secret"]))
            socket.curve_publickey = z85.encode(bytes.fromhex(keys["public"]))
    monitor = socket.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(at)
    return socket, monitor


@pytest.mark.parametrize("role", ["link", "blobs", "pulse"])
@pytest.mark.parametrize("knows", ["nothing", "the server's key", "another engine's keys"])
async def test_strangers_are_refused(role: str, knows: str) -> None:
    """Whoever reaches the port, and even who knows the adapter's public key, but is no worker of this engine."""
    with adapter() as ends, zmq.Context() as context:
        own = {name: values[0] for name, values in parse_qs(ends.address.partition("?")[2]).items()}
        keys = {
            "nothing": None,
            "the server's key": {"server": own["server"]},
            "another engine's keys": Guard().parameters(),
        }[knows]
        socket, monitor = stranger(context, endpoint(ends.address, role), keys)
        forged = Report(time=666.0, steps=[StepRecord("r", 0, 0, msgspec.Raw(b"\x90"))])
        socket.send(msgspec.msgpack.encode(forged))
        assert monitor.poll(30000)
        seen = parse_monitor_message(monitor.recv_multipart())["event"]
        assert seen & REFUSED
        assert ends.link.ready() == []
        socket.disable_monitor()
        context.destroy(linger=0)


async def test_the_keys_let_in() -> None:
    """What the test above would miss if nobody could get in at all."""
    with adapter() as ends, zmq.Context() as context:
        keys = {name: values[0] for name, values in parse_qs(ends.address.partition("?")[2]).items()}
        socket, monitor = stranger(context, endpoint(ends.address), keys)
        assert monitor.poll(30000)
        assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        socket.disable_monitor()
        context.destroy(linger=0)


async def test_a_worker_ends_with_its_adapter() -> None:
    """A connection that comes back would have lost what was under way."""
    with ExitStack() as stack:
        ends = stack.enter_context(adapter())
        process = stack.enter_context(worker(ends.address))
        await reports(ends.link, 1)
        ends.link.close()
        assert "connection to the adapter (link) is gone" in await ended(process)


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
            assert lost == ["nothing has been heard for 2 s of the far worker"]


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


def test_on_one_machine_nothing_listens() -> None:
    with LinkReceiver() as link, BlobReceiver(link.address) as blobs, HeartbeatReceiver(blobs.address) as pulse:
        assert pulse.address == blobs.address == link.address
        assert link.address.startswith("ipc://")
        assert link.guard is None
        assert inputs_at(link.address) == link.folder


def test_an_address_that_is_not_of_this_machine() -> None:
    with pytest.raises(zmq.ZMQError):
        LinkReceiver("192.0.2.77")


# --- large variables --------------------------------------------------------------------------------------------------


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
    await bus.blobs.store("b", value, "w")
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
        async with inputs.of(_with(ref, "b")):
            assert equal(to_tensors(ref, torch.device("cpu"), carrier.held), value)
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
    monkeypatch.setattr("tracewire_engine.adapter.large_inputs.DROP_S", 0.05)
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
