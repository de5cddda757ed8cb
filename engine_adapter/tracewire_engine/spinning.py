"""vLLM's processes wait for each other without keeping a core busy, where cores are what the model runs on.

EngineCore and its workers exchange messages through shared memory. Whoever waits for one looks again and again for a
second after the last, and only then sleeps until it is told. On a GPU host, with cores to spare, that saves a step some
wakeups. On a CPU it takes cores from the model, the adapter, Redis and its readers: with two of them, half of one.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["sleep_instead"]

#: How long a wait lasts at most where vLLM would spin, in milliseconds: a notice may be lost while sockets connect.
_MOST_MS = 10


def sleep_instead() -> None:
    """Have this process, EngineCore or one of its workers, wait by sleeping from the first moment on. Idempotent."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning: Any = SpinCondition.wait
    if getattr(spinning, "tracewire", False):
        return

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        spins = self.busy_loop_s
        if time.monotonic() <= self.last_read + spins:
            timeout_ms = _MOST_MS if timeout_ms is None else min(timeout_ms, _MOST_MS)
        self.busy_loop_s = -1.0
        try:
            spinning(self, timeout_ms)
        finally:
            self.busy_loop_s = spins

    wait.tracewire = True  # type: ignore[attr-defined]
    SpinCondition.wait = wait
