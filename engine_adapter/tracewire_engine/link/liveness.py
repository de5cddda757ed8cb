"""A worker and its adapter look whether the other is still there, when they are on different machines.

On one machine the kernel tells. Across a network that was cut nobody does: a step waits in a collective operation, and
Ray finds out when its own health checks have failed, which takes as long as its cluster was set to. So each worker
sends a beat a second, which the adapter answers. A worker that hears nothing for the *patience* ends itself, and sets
its device free; an adapter that misses a worker for as long gives its engine up.

Beats have a thread of their own on both sides. A process that holds the interpreter lock for so long counts as dead.
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
    """The worker's end. `name` tells the adapter's log who it is."""

    def __init__(self, address: str, name: str, patience_s: float) -> None:
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
    """The adapter's end. `address` is the link's with this socket in it.

    Where workers are on this machine only, it does nothing.
    """

    def __init__(self, link_address: str, guard: Guard | None = None, patience_s: float = 30.0) -> None:
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
        """Call `lost` once, on a thread, with a sentence that says which worker has been silent for too long."""
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
                # The poll may have seen a connection that is being accepted, and no message.
                with suppress(zmq.Again):
                    who, name = self._socket.recv_multipart(zmq.NOBLOCK)[:2]
                    heard[name] = time.monotonic()
                    self._socket.send_multipart([who, b""], zmq.NOBLOCK)
            last, looked = looked, time.monotonic()
            if looked - last > self._patience_s / 2:
                # This process did not run: what has come meanwhile is still to be read.
                heard = dict.fromkeys(heard, looked)
            silent = [name.decode(errors="replace") for name, at in heard.items() if looked - at > self._patience_s]
            if silent and self._lost is not None:
                lost, self._lost = self._lost, None
                lost(f"nothing has been heard for {self._patience_s:g} s of {', '.join(silent)}")
        self._unprotect()
        self._context.destroy(linger=0)
