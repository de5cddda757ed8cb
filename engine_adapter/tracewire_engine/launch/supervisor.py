"""The supervisor: a process that starts an adapter, and starts another one if it dies.

An adapter whose engine is lost ends, and its traces wait on the bus for another engine. The supervisor imports nothing
of vLLM, so it stays small and does not fail for an engine's reasons. It copies the adapter's output to its own. It
passes SIGTERM and SIGINT to the adapter as SIGTERM. If the adapter does not exit in time after that, the supervisor
kills it, and its child processes end with it. Before it starts the next adapter, it kills the processes that the last
one left behind, since they hold memory. If the supervisor dies, all its descendants die too.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from .secret import Given

if TYPE_CHECKING:
    import psutil

__all__ = ["DRAINING", "SUPERVISOR_PID", "supervise"]

logger = logging.getLogger("tracewire")

#: Environment variable of the adapter: the process id of its supervisor.
SUPERVISOR_PID = "TRACEWIRE_SUPERVISOR_PID"

#: The prefix of the line that an adapter prints when it was asked to drain. It is not restarted, whatever its status.
DRAINING = "draining "

#: Exit statuses after which an adapter is not restarted: it was told to leave, or it refuses its settings.
_FOR_GOOD = (0, 2)
#: Waits between two starts, in seconds: the first, and the longest.
_FIRST_S, _MOST_S = 1.0, 60.0
#: How many starts in a row may end without serving before the supervisor gives up.
_VAIN = 5
#: How often a wait checks for a signal, in seconds; how long to wait for the rest of a dead adapter's output, in
#: seconds; and how many rounds of killing the processes that it left behind there are.
_LOOK_S, _RELAY_S, _ROUNDS = 0.1, 5.0, 3
_PR_SET_CHILD_SUBREAPER = 36
#: How long an adapter may take to exit after SIGTERM, in seconds, by default.
GRACE_S = 60.0


class _Supervisor:
    def __init__(self, command: Sequence[str], grace_s: float, given: Given) -> None:
        self._command = list(command)
        self._given = given
        self._grace_s = grace_s
        self._child: subprocess.Popen[bytes] | None = None
        #: Not a `threading.Event`: a signal handler that interrupts its own thread could wait for the event's lock for
        #: ever.
        self._stopping = False
        #: Whether the adapter that runs now has served.
        self._served = False
        #: Whether the adapter was asked on the bus to drain.
        self._draining = False

    def stop(self, number: int, frame: object) -> None:
        """Signal handler: pass the signal to the adapter, and limit its time to exit."""
        if not self._stopping:
            # Counted from the first signal: further signals do not extend the time.
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._stopping = True
        self._tell()

    def kill(self, number: int, frame: object) -> None:
        """Signal handler of the timer: kill an adapter that did not exit in time. Its children end with it."""
        child = self._child
        if child is not None:
            os.write(2, b"tracewire engine: the adapter did not exit in time and is killed\n")
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)

    def _tell(self) -> None:
        child = self._child
        if child is not None:
            # The process id stays valid until `_once` takes the status, and `_once` forgets the child before that.
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    def run(self, restarts: int | None) -> int:
        vain = 0
        for left in _countdown(restarts):
            began = time.monotonic()
            status = self._once()
            if self._stopping or self._draining or status in _FOR_GOOD:
                return status
            vain = 0 if self._served else vain + 1
            lasted = time.monotonic() - began
            logger.error("the adapter exited with status %d after %.0f s", status, lasted)
            if left == 0 or vain == _VAIN:
                return status
            pause = min(_MOST_S, _FIRST_S * 2**vain) * random.uniform(0.5, 1.0)
            logger.warning("starting the adapter again in %.1f s", pause)
            if self._stopped_within(pause):
                return 0
        return 0

    def _stopped_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._stopping and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return self._stopping

    def _once(self) -> int:
        """Run one adapter to its end. Returns its exit status, 128 plus the signal's number if a signal killed it."""
        self._served = False
        handed, environment = self._given.hand()
        try:
            # In a process group of its own: a Ctrl-C at the terminal reaches the supervisor, which passes it on.
            # Started on the main thread, because the kernel ends the adapter with the thread that started it.
            child = self._child = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                env={**environment, SUPERVISOR_PID: str(os.getpid())},
                pass_fds=[int(handed)],
                process_group=0,
            )
        finally:
            os.close(int(handed))
        if self._stopping:
            self._tell()
        assert child.stdout is not None
        relay = threading.Thread(target=self._relay, args=(child.stdout,), daemon=True)
        relay.start()
        _reap_until(child.pid)
        self._child = None
        status = child.wait()
        _end_children()
        # No process holds the pipe's other end, so the thread ends, and has seen whether the adapter served.
        relay.join(_RELAY_S)
        return status if status >= 0 else 128 - status

    def _relay(self, lines: IO[bytes]) -> None:
        """Copy the adapter's output until it ends. An adapter whose output is not read would block."""
        for line in lines:
            self._served = self._served or line.startswith(b"ready ")
            self._draining = self._draining or line.startswith(DRAINING.encode())
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except (OSError, ValueError) as error:
                logger.debug("the adapter's output could not be copied: %s", error)


def _countdown(count: int | None) -> Sequence[int] | range:
    """For each start, how many more starts are left after it. Practically endless for `None`."""
    return range(sys.maxsize - 1, -1, -1) if count is None else range(count, -1, -1)


def _reap_until(pid: int) -> None:
    """Wait until this child has ended, without taking its exit status.

    Other children that end meanwhile are orphans that the supervisor adopted; their status is taken.
    """
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if found is None or found.si_pid == pid:
            return
        with suppress(ChildProcessError):
            os.waitpid(found.si_pid, 0)


def _end_children() -> None:
    """Kill the processes that an adapter left behind, which this process has adopted.

    The one that removes the shared memory of the others is left to end by itself, and killed last if it does not.
    """
    import psutil

    # In several rounds, since a process may start another one before it is killed.
    for number in range(_ROUNDS):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            # Some processes end by themselves when their parents do.
            with suppress(psutil.Error):
                if number < _ROUNDS - 1 and _removes_shared_memory(process):
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    logger.warning("killing process %d, which outlived its adapter", process.pid)
                process.kill()
        psutil.wait_procs(left, timeout=30 / _ROUNDS)


def _removes_shared_memory(process: psutil.Process) -> bool:
    """Whether this is Python's process that removes the shared memory of others once they have ended, and then ends.

    Or one that is ending already, which the kernel has no command line of.
    """
    words = process.cmdline()
    return not words or any("multiprocessing.resource_tracker" in one for one in words)


def supervise(
    command: Sequence[str], restarts: int | None, grace_s: float = GRACE_S, given: Given | None = None
) -> int:
    """Run an adapter, and start another one when it dies.

    Gives up after `_VAIN` starts in a row that never served. On Linux, it adopts and kills the processes that an
    adapter leaves behind.

    Args:
        command: of the adapter.
        restarts: how often to start another adapter; `None` for any number.
        grace_s: how long an adapter may take to exit after SIGTERM or SIGINT, in seconds. Then it is killed.
        given: the arguments and secrets to hand to each adapter.

    Returns:
        The exit status of the last adapter, or 0 if a signal came between two adapters.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        logger.debug("this system cannot adopt the processes that an adapter leaves behind")
    supervisor = _Supervisor(command, grace_s, given or Given([]))
    signal.signal(signal.SIGALRM, supervisor.kill)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    return supervisor.run(restarts)
