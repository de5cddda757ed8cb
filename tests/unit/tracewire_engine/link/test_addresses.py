"""Who may connect to an adapter, and from where."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tests.support.far_link import REFUSED, adapter, stranger
from tracewire_engine.link.addresses import Guard, endpoint
from tracewire_engine.link.step_link import LinkReceiver
from tracewire_engine.protocol.messages import Report, StepRecord


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
        assert list(ends.link.ready()) == []
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


def test_an_address_that_is_not_of_this_machine() -> None:
    with pytest.raises(zmq.ZMQError):
        LinkReceiver("192.0.2.77")
