"""Heartbeats between the adapter and workers on other machines, so that each finds out if the other is gone.

On one machine the kernel ends a worker whose parent dies. If the network between two machines fails, there is no such
signal: a step waits in a collective operation, and Ray notices only when its own health checks fail, which depends on
the cluster's settings. So each worker sends a heartbeat every second, and the adapter answers it. If a worker gets no
answer for the *patience*, it kills itself and thereby frees its device. If the adapter gets no heartbeat from a worker
for as long, it ends its engine.

Both sides use a thread of their own for heartbeats. A process that holds the interpreter lock for longer than the
patience counts as dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from .addresses import Guard, bind, connect, die, endpoint, extended, is_remote
from .step_link import Receiver

__all__ = ["HeartbeatReceiver", "HeartbeatSender"]

logger = logging.getLogger("tracewire")

_BEAT_S = 1.0


class HeartbeatSender:
    """The worker's end: sends heartbeats, and kills this process if the adapter does not answer."""

    def __init__(self, address: str, name: str, patience_s: float) -> None:
        """Start the thread.

        Args:
            address: of the adapter.
            name: of this worker, for the adapter's log.
            patience_s: how long to wait for an answer, in seconds.
        """
        self._address = address
        self._name = name.encode()
        self._patience_s = patience_s
        threading.Thread(target=self._run, name="tracewire pulse", daemon=True).start()

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        connect(socket, self._address, "pulse")
        heard = time.monotonic()
        while True:
            socket.send(self._name, zmq.NOBLOCK)
            if socket.poll(int(_BEAT_S * 1000)):
                with suppress(zmq.Again):
                    while True:
                        socket.recv(zmq.NOBLOCK)
                heard = time.monotonic()
                time.sleep(_BEAT_S)
            elif time.monotonic() - heard > self._patience_s:
                die(f"its adapter has not answered for {self._patience_s:g} s")


class HeartbeatReceiver(Receiver):
    """The adapter's end: answers heartbeats, and reports workers that stay silent.

    It does nothing if all workers are on this machine.
    """

    def __init__(self, link_address: str, guard: Guard | None = None, patience_s: float = 30.0) -> None:
        """Bind the socket and start the thread. `address` is then `link_address` with this socket added.

        Args:
            link_address: of the adapter.
            guard: the link's.
            patience_s: how long a worker may be silent, in seconds.
        """
        self.address = link_address
        self._patience_s = patience_s
        self._lost: Callable[[str], None] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not is_remote(link_address):
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._unprotect = guard.protect(self._context, self._socket) if guard is not None else lambda: None
        host = endpoint(link_address).rpartition(":")[0]
        self.address = extended(link_address, "pulse", bind(self._socket, f"{host}:*"))
        self._thread = threading.Thread(target=self._run, name="tracewire pulse", daemon=True)
        self._thread.start()

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Have the thread call `lost` once if workers are silent for too long, with a message that names them."""
        self._lost = lost

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        heard: dict[bytes, float] = {}
        looked = time.monotonic()
        while not self._closing.is_set():
            if self._socket.poll(int(_BEAT_S * 1000 / 4)):
                # The socket can signal a message while it only accepts a connection.
                with suppress(zmq.Again):
                    who, name = self._socket.recv_multipart(zmq.NOBLOCK)[:2]
                    heard[name] = time.monotonic()
                    self._socket.send_multipart([who, b""], zmq.NOBLOCK)
            last, looked = looked, time.monotonic()
            if looked - last > self._patience_s / 2:
                # This process did not run for a while, and heartbeats that came meanwhile are still to be read.
                heard = dict.fromkeys(heard, looked)
            silent = [name.decode(errors="replace") for name, at in heard.items() if looked - at > self._patience_s]
            if silent and self._lost is not None:
                lost, self._lost = self._lost, None
                lost(f"no heartbeat came for {self._patience_s:g} s from {', '.join(silent)}")
        self._unprotect()
        self._context.destroy(linger=0)
