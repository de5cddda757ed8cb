"""Makes each process of an engine end when the process that started it ends.

vLLM's EngineCore does not watch its parent: if the process with `AsyncLLM` is killed by SIGKILL, EngineCore goes on and
keeps its memory. vLLM calls the functions of the entry-point group `vllm.general_plugins` early in EngineCore and in
every worker. `register` is one of them. It asks the kernel (Linux) to send the process SIGKILL when its parent dies.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

from .quick_exit import leave_when_done

__all__ = ["ADAPTER_PID", "die_with_parent", "register"]

#: Environment variable holding the adapter's process id, which its children inherit.
ADAPTER_PID = "TRACEWIRE_ADAPTER_PID"

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to send this process SIGKILL when its parent dies.

    The kernel watches the *thread* that started this process. So a process must be started by a thread that lives as
    long as the parent does. Does nothing on a system other than Linux.

    Args:
        parent: the expected process id of the parent. If the parent is another process, the expected one has died
            already, and this process is killed at once.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def register() -> None:
    """The plugin that vLLM calls: end this process with its parent, if it descends from an adapter. Else do nothing."""
    adapter = os.environ.get(ADAPTER_PID, "")
    if adapter and adapter != str(os.getpid()):
        # In a process group of its own, so that a Ctrl-C at the terminal reaches the adapter alone, which drains first.
        if os.getpgid(0) == os.getpgid(os.getppid()):
            os.setpgid(0, 0)
        die_with_parent()
        # The adapter turns garbage collection off while it starts, and a forked process inherits that.
        gc.enable()
        leave_when_done()
