"""The process that starts an adapter, and starts it again when it has died.

An adapter whose engine is lost ends: what it ran waits on the bus for another. The supervisor imports nothing of vLLM,
so that it stays small and cannot die of what an engine dies of. It passes on what the adapter prints, hands it SIGTERM
and SIGINT as SIGTERM, and takes care that no process of the last engine is left, with the memory it holds, when the
next one starts. An adapter that has not left some time after it was told to is killed with all below it. When the
supervisor dies itself, all below it die with it.
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
from typing import IO

from .secret import Given

__all__ = ["DRAINING", "SUPERVISOR_PID", "supervise"]

logger = logging.getLogger("tracewire")

#: Environment variable of the adapter: the process id of its supervisor.
SUPERVISOR_PID = "TRACEWIRE_SUPERVISOR_PID"

#: The prefix of the line by which an adapter says that it leaves for good, whatever its exit status.
DRAINING = "draining "

#: Exit statuses of an adapter that was told to leave, or refuses its settings: it would again.
_FOR_GOOD = (0, 2)
#: Waits between two starts, in seconds: the first, and the longest.
_FIRST_S, _MOST_S = 1.0, 60.0
#: How many starts in a row may end without an engine that serves.
_VAIN = 5
#: How soon a signal ends a wait, in seconds; how long the last words of an adapter may take; and how often is looked
#: for what it left behind.
_LOOK_S, _RELAY_S, _ROUNDS = 0.1, 5.0, 3
_PR_SET_CHILD_SUBREAPER = 36
#: How long an adapter may take to leave, in seconds, where nobody says.
GRACE_S = 60.0


class _Supervisor:
    def __init__(self, command: Sequence[str], grace_s: float, given: Given) -> None:
        self._command = list(command)
        self._given = given
        self._grace_s = grace_s
        self._child: subprocess.Popen[bytes] | None = None
        #: No event of `threading`: a signal's handler that interrupts its own thread would wait for its lock for ever.
        self._stopping = False
        #: Whether the adapter that runs now has served.
        self._served = False
        #: Whether it was asked on the bus to leave.
        self._draining = False

    def stop(self, number: int, frame: object) -> None:
        """Hand a signal on."""
        if not self._stopping:
            # Counted from the first signal: further signals do not extend the time.
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        self._stopping = True
        self._tell()

    def kill(self, number: int, frame: object) -> None:
        """Kill an adapter that has not left. Its child processes end as after any other death."""
        child = self._child
        if child is not None:
            os.write(2, b"tracewire engine: the adapter did not leave in time, and is killed\n")
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
            logger.error("the adapter ended with %d after %.0f s", status, lasted)
            if left == 0 or vain == _VAIN:
                return status
            pause = min(_MOST_S, _FIRST_S * 2**vain) * random.uniform(0.5, 1.0)
            logger.warning("starting it again in %.1f s", pause)
            if self._stopped_within(pause):
                return 0
        return 0

    def _stopped_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._stopping and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return self._stopping

    def _once(self) -> int:
        """Run one adapter to its end; its exit status."""
        self._served = False
        handed, environment = self._given.hand()
        try:
            # In a group of its own: a Ctrl-C at the terminal comes by us. On this thread, which the kernel ties it to.
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
        # Nobody has the other end any more, so it ends; whether it has served is known then.
        relay.join(_RELAY_S)
        return status if status >= 0 else 128 - status

    def _relay(self, lines: IO[bytes]) -> None:
        """Pass on what an adapter prints, to its end: one that nobody reads from would stand still."""
        for line in lines:
            self._served = self._served or line.startswith(b"ready ")
            self._draining = self._draining or line.startswith(DRAINING.encode())
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except (OSError, ValueError) as error:
                logger.debug("what the adapter prints reaches nobody: %s", error)


def _countdown(count: int | None) -> Sequence[int] | range:
    """How many starts are left after this one, for each; without end for `None`."""
    return range(sys.maxsize - 1, -1, -1) if count is None else range(count, -1, -1)


def _reap_until(pid: int) -> None:
    """Wait until this child has ended, and leave its status. Others that end meanwhile are orphans, and ours."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if found is None or found.si_pid == pid:
            return
        with suppress(ChildProcessError):
            os.waitpid(found.si_pid, 0)


def _end_children() -> None:
    """Kill what is left of an adapter's children: they are ours, once it is gone."""
    import psutil

    # Again, for what they started meanwhile.
    for _ in range(_ROUNDS):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            # Some end by themselves, with their parents.
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    logger.warning("killing process %d, which outlived its adapter", process.pid)
                process.kill()
        psutil.wait_procs(left, timeout=30 / _ROUNDS)


def supervise(
    command: Sequence[str], restarts: int | None, grace_s: float = GRACE_S, given: Given | None = None
) -> int:
    """Run `command`, an adapter, and again when it has died, up to `restarts` times (`None`: any number).

    Each is handed what was `given`. After SIGTERM or SIGINT it has `grace_s` seconds to leave, and is killed then, with
    all that it has started.
    Returns the exit status that is to be ours: the last adapter's. Gives up after some starts in a row of which none
    came to serve. On Linux, what its children leave behind is adopted, and ended.
    """
    try:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        logger.debug("processes that an adapter leaves behind cannot be adopted here")
    supervisor = _Supervisor(command, grace_s, given or Given([]))
    signal.signal(signal.SIGALRM, supervisor.kill)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    return supervisor.run(restarts)
