"""Addresses of the adapter's sockets, and the keys that protect them.

On one machine the sockets are unix sockets in a folder that only their user can enter. Workers on other machines need
TCP, which any host on the network can reach. So TCP sockets use CURVE, ZeroMQ's encryption, and the adapter accepts
only connections with the key pair that it gave its workers. Each adapter makes new keys and stores them nowhere.

An address is one string: `ipc:///run/x/link`, or `tcp://10.0.0.1:4711?blobs=4712&server=...`, with the ports of the
other sockets and the keys in hexadecimal.

A TCP connection can break and be established again, and messages on the way are then lost silently. So a worker whose
connection breaks kills itself. Its engine then ends as a whole, and other engines take over the traces.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, urlencode

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Guard", "bind", "connect", "die", "endpoint", "extended", "host_and_port", "is_remote"]

logger = logging.getLogger("vllm.tracewire")

#: How often a silent TCP connection gets a heartbeat, and how long it may stay silent, in seconds.
_BEAT_S, _SILENT_S = 2, 20

#: The events of a socket that mean the end of a connection.
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _Pair(NamedTuple):
    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Self:
        return cls(*zmq.curve_keypair())


class Guard:
    """The adapter's CURVE keys: its own pair, and the pair that all its workers use."""

    def __init__(self) -> None:
        self._server, self._workers = _Pair.new(), _Pair.new()

    def protect(self, context: zmq.Context[Any], socket: zmq.Socket[Any]) -> Callable[[], None]:
        """Let only this adapter's workers connect to `socket`. Call it before the socket is bound.

        Args:
            context: of the socket. Only one socket of a context can be protected.
            socket: to protect.

        Returns:
            A function to call before the context is destroyed.
        """
        authenticator = ThreadAuthenticator(zmq.Context.shadow(context.underlying))
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=self)
        socket.curve_server = True
        socket.curve_publickey = self._server.public
        socket.curve_secretkey = self._server.secret
        return authenticator.stop

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with the public key `key` may connect. pyzmq calls it."""
        return key == self._workers.public

    def parameters(self) -> dict[str, str]:
        """The keys as parameters of an address, for the workers. They are secret."""
        return {
            "server": _hexadecimal(self._server.public),
            "public": _hexadecimal(self._workers.public),
            "secret": _hexadecimal(self._workers.secret),
        }


def _hexadecimal(key: bytes) -> str:
    return z85.decode(key).hex()


def is_remote(address: str) -> bool:
    """Whether workers on other machines can reach this address."""
    return address.startswith("tcp://")


def endpoint(address: str, role: str = "link") -> str:
    """ZeroMQ's endpoint of the socket `role` (`"link"`, `"blobs"`, `"pulse"`) of an adapter at `address`."""
    base, _, parameters = address.partition("?")
    if role == "link":
        return base
    if not is_remote(address):
        return f"{base}-{role}"
    return f"{base.rpartition(':')[0]}:{parse_qs(parameters)[role][0]}"


def extended(address: str, role: str, bound: str) -> str:
    """Add the port of the socket `role`, which is bound to the endpoint `bound`, to a remote address."""
    return f"{address}&{urlencode({role: bound.rpartition(':')[2]})}" if is_remote(address) else address


def bind(socket: zmq.Socket[Any], at: str) -> str:
    """Bind a socket to an endpoint; `tcp://HOST:*` means any free port. Returns the actual endpoint."""
    if at.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(at)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect(socket: zmq.Socket[Any], address: str, role: str = "link") -> None:
    """Connect a worker's socket. If the address is remote, this process kills itself when the connection ends.

    Args:
        socket: to connect.
        address: of the adapter.
        role: which of the adapter's sockets to connect to: `"link"`, `"blobs"` or `"pulse"`.
    """
    if is_remote(address):
        keys = parse_qs(address.partition("?")[2])
        server, public, secret = (z85.encode(bytes.fromhex(keys[name][0])) for name in ("server", "public", "secret"))
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret
        socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_S * 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_S * 1000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _SILENT_S * 1000)
        monitor = socket.get_monitor_socket(_BROKEN)
        watch = threading.Thread(target=_watch, args=(monitor, role), name=f"tracewire {role} watch", daemon=True)
        watch.start()
    socket.connect(endpoint(address, role))


def _watch(monitor: zmq.Socket[Any], role: str) -> None:
    try:
        event = zmq.Event(recv_monitor_message(monitor)["event"])
    except zmq.ZMQError:  # the process ends
        return
    die(f"its connection to the adapter ({role}) ended: {event.name}")


def die(why: str) -> None:
    """Kill this process by SIGKILL, which no thread and no collective operation can hold up, and log the reason."""
    logger.error("this worker ends: %s", why)
    os.kill(os.getpid(), signal.SIGKILL)


def host_and_port(address: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`; an IPv6 host is in brackets.

    Raises:
        ValueError: `address` is not of this form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT, got {address!r}")
    return host, int(port)
