"""An adapter and a worker that has only its address, as a worker on another machine has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import anyio
import zmq
from zmq.utils import z85

from tracewire_engine.link.blob_receiver import BlobReceiver
from tracewire_engine.link.liveness import HeartbeatReceiver
from tracewire_engine.link.step_link import LinkReceiver
from tracewire_engine.protocol.messages import Report

#: What a handshake that was refused looks like to who tried it.
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


PATIENCE = 60


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
