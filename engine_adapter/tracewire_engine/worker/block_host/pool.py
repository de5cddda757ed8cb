"""Starts hosts of blocks, some ahead of need, and ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque

import msgspec

from tracewire_engine.link.host_channel import HostChannel, receive_descriptors, send_descriptors
from tracewire_engine.link.message_memory import MessageMemory
from tracewire_engine.link.shared_rows import RowMemory, sealed_memory
from tracewire_engine.protocol.block_host import FAILED, MOST_REPORTED, MOST_SAID, HostSettings

from .relay_link import SaveEnds

__all__ = ["HostPool", "HostProcess"]

logger = logging.getLogger("vllm.tracewire")

#: How much memory a worker and a host share in each direction, in bytes. It takes room as it is used.
SHARED_BYTES = 1 << 30

#: How much memory a host shares with the worker for what it reports, and with the save relay for what its blocks have
#: saved. So much is copied at once at most.
REPORTED_BYTES = 8 << 20

#: How long the server of hosts may take to start, while the engine serves nothing, and how long to fork a host, while
#: the model may wait; in seconds.
_START_S, _FORK_S = 120.0, 5.0

#: How much is read of the lines at which a block was, in bytes: what a pipe holds.
_MOST_PLACES = 1 << 16

#: The variables of the worker's environment that the server of hosts is given.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class HostProcess:
    """A process that runs the blocks of one trace, and the worker's ends of its connections."""

    def __init__(self, pid: int, process: int, ends: _Ends, large: int = 0) -> None:
        self.pid = pid
        #: The size above which an array of its saves is large, in bytes; 0: none is.
        self.large = large
        self._process = process
        self.calls, self.reports = ends.calls, ends.reports
        self.given, self.returned = ends.given, ends.returned
        self._ends = ends
        self._closed = False
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        # A descriptor that was closed may be another one by now.
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def take_saves(self) -> SaveEnds:
        """The save relay's ends of its connection, which the caller closes. Called once."""
        saves, self._ends.saves = self._ends.saves, None
        assert saves is not None
        return saves

    def alive(self) -> bool:
        """Whether the process has not ended."""
        if self._closed:
            return False
        # A worker may have more descriptors than `select.select` takes.
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return not poll.poll(0)

    def places(self) -> str:
        """Where its block was when the time was over, as `time_limit.note_places` has it. Only the first call has it.

        A block can have written anything there.
        """
        with self._lock, contextlib.suppress(OSError):
            if not self._closed:
                return os.read(self._ends.places, _MOST_PLACES).decode(errors="replace")
        return ""

    def close(self) -> None:
        """Kill the process if it has not ended, and close what belongs to it. Idempotent."""
        with self._lock:
            self._kill()
            if self._closed:
                return
            self._closed = True
            os.close(self._process)
            self._ends.close()


class _Ends:
    """The worker's ends of the connections of a host that is being started.

    Raises:
        OSError: there are too many descriptors.
    """

    def __init__(self) -> None:
        #: What closes this process's ends, and those of the host until it has them.
        self._own, self._others = contextlib.ExitStack(), contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._others.close()
            self._own.close()
            raise

    def _open(self) -> None:
        calls, self._calls = self._pair()
        reports, self._reports = self._pair()
        memory = MessageMemory.create(REPORTED_BYTES)
        self.calls, self.reports = HostChannel(calls, MOST_SAID), HostChannel(reports, MOST_REPORTED, memory=memory)
        self._own.callback(self.reports.close)
        self._reported = memory.descriptor
        saves, self._saver = self._pair()
        saved = sealed_memory(REPORTED_BYTES)
        self.saves: SaveEnds | None = SaveEnds(saves.detach(), saved)
        self._own.callback(self._close_saves)
        self.given, self.returned = self._memory(), self._memory()
        self.places, self._places = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._own.callback(os.close, self.places)
        self._others.callback(os.close, self._places)

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self._own.callback(ours.close)
        self._others.callback(theirs.close)
        return ours, theirs

    def _memory(self) -> RowMemory:
        made = RowMemory.create(SHARED_BYTES)
        self._own.callback(made.close)
        return made

    def _close_saves(self) -> None:
        if self.saves is not None:
            self.saves.close()

    def hand_over(self, control: socket.socket) -> None:
        """Give the other ends to the server of hosts.

        Raises:
            OSError: the server has ended.
        """
        sockets = [self._calls, self._reports, self._saver]
        assert self.saves is not None
        memory = [self.given.descriptor, self.returned.descriptor, self._reported, self.saves.memory]
        try:
            send_descriptors(control, b"host", [*(one.fileno() for one in sockets), *memory, self._places])
        finally:
            self._others.close()

    def close(self) -> None:
        """Close them, but for those that the save relay has. Idempotent."""
        self._own.close()


class HostPool:
    """Hosts of blocks, `spare` of which wait for a trace.

    Args:
        settings: of the engine.
        spare: how many hosts to start ahead of need.
    """

    def __init__(self, settings: HostSettings, spare: int = 2) -> None:
        self._spare, self._large = spare, settings.blob_threshold
        self._starting: deque[_Ends] = deque()
        self._ready = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        described = os.memfd_create("tracewire-host-settings")
        os.write(described, msgspec.msgpack.encode(settings))
        os.lseek(described, 0, os.SEEK_SET)
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # Threads of OpenMP that wait sleep, since hosts wait most of the time.
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        environment |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONNOUSERSITE": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tracewire_engine.block_host.server", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        theirs.close()
        send_descriptors(self._control, b"settings", [described])
        os.close(described)
        self._control.settimeout(_START_S)

    def ahead(self) -> None:
        """Have the server start hosts ahead of need. Does not wait for them."""
        while len(self._starting) < self._spare:
            self._start()

    def _start(self) -> None:
        ends = _Ends()
        try:
            ends.hand_over(self._control)
        except OSError:
            ends.close()
            raise
        self._starting.append(ends)

    def start_relay(self) -> socket.socket:
        """Have the server start a save relay. Returns the worker's end of its socket. Does not wait.

        Raises:
            OSError: the server of hosts has ended.
        """
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        send_descriptors(self._control, b"relay", [theirs.fileno()])
        theirs.close()
        return control

    def wait_ready(self) -> None:
        """Wait until the server can start hosts.

        Raises:
            OSError: the server of hosts has ended, or does not answer.
        """
        if not self._ready:
            message, _ = receive_descriptors(self._control)
            if message != b"ready":
                raise ConnectionError("the process that starts hosts of blocks has ended; see the engine's log")
            self._ready = True
            self._control.settimeout(_FORK_S)

    def take(self) -> HostProcess:
        """A host for a trace. Waits for it if none was started ahead.

        Raises:
            OSError: the server of hosts has ended, does not answer, or could not start a host.
        """
        if not self._starting:
            self._start()
        host = self._started()
        try:
            self.ahead()
        except OSError as error:  # such as too many descriptors: the next trace may have its host all the same
            logger.warning("no host of blocks was started ahead of need: %s", error)
        return host

    def _started(self) -> HostProcess:
        self.wait_ready()
        try:
            message, descriptors = receive_descriptors(self._control)
        except TimeoutError:
            raise TimeoutError(f"no host of blocks was started within {_FORK_S:g} s; submit the trace again") from None
        if not message:
            raise ConnectionError("the process that starts hosts of blocks has ended; see the engine's log")
        ends = self._starting.popleft()
        said = message.decode()
        if not descriptors:
            ends.close()
            raise OSError(f"no host of blocks could be started ({said.removeprefix(FAILED)}); submit the trace again")
        return HostProcess(int(said), descriptors[0], ends, self._large)

    def close(self) -> None:
        """End the server and all hosts that wait."""
        self._server.kill()
        self._server.wait()
        self._control.close()
        while self._starting:
            self._starting.popleft().close()
