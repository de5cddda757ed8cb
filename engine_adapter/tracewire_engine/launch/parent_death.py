"""No process outlives the one that started it.

vLLM's EngineCore does not watch its parent: when the process that holds `AsyncLLM` is killed outright, EngineCore lives
on with its memory. vLLM loads the functions of the entry-point group `vllm.general_plugins` early in EngineCore and in
every worker; `register` is ours there, and asks the kernel (Linux) to send SIGKILL to the process when its parent goes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

__all__ = ["ADAPTER_PID", "die_with_parent", "register"]

#: Environment variable holding the adapter's process id, which its children inherit.
ADAPTER_PID = "TRACEWIRE_ADAPTER_PID"

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process with SIGKILL when its parent dies; at once if `parent` is not its parent.

    The signal is tied to the *thread* that started this process, so a process must be started by a thread that lives
    as long as the parent does. Does nothing where the kernel has no such signal.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def register() -> None:
    """Plugin entry point: tie a descendant of an adapter to its parent. A no-op in any other vLLM process."""
    adapter = os.environ.get(ADAPTER_PID, "")
    if adapter and adapter != str(os.getpid()):
        # In a group of its own, so that a Ctrl-C at the terminal reaches the adapter alone, which drains first.
        if os.getpgid(0) == os.getpgid(os.getppid()):
            os.setpgid(0, 0)
        die_with_parent()
        # The adapter collects no garbage while it starts, and a process that is forked begins as it is then.
        gc.enable()
