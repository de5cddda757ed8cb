"""An account of the processor time that parts of this process's main thread take."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

__all__ = ["ThreadAccount"]


class ThreadAccount:
    """Counts the processor time of methods on the main thread, each without that of the others that it calls.

    A counted call takes about a microsecond more.

    Args:
        parts: the methods, each by its class and its name. They are counted as long as this process runs.
    """

    def __init__(self, parts: Iterable[tuple[type, str]]) -> None:
        self._taken: Counter[str] = Counter()
        self._within: list[int] = []
        for owner, name in parts:
            setattr(owner, name, self._counted(owner.__dict__[name], f"{owner.__name__}.{name}"))

    def _counted(self, method: Any, name: str) -> Any:
        @functools.wraps(method)
        def counted(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return method(*args, **options)
            began = time.thread_time_ns()
            self._within.append(0)
            try:
                return method(*args, **options)
            finally:
                took = time.thread_time_ns() - began
                self._taken[name] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return counted

    def reset(self) -> None:
        """Begin anew."""
        self._taken.clear()

    def most(self, count: int, steps: int) -> dict[str, int]:
        """The parts that have taken most, in microseconds a step."""
        return {name: round(taken / 1000 / steps) for name, taken in self._taken.most_common(count)}
