"""A thread that notices a turn which the timer does not interrupt.

A block can ignore or block the timer's signal, or stop the timer. The thread looks at the turn from time to time. If
the turn should have been interrupted a while ago, the thread sends the model's thread another signal, with the same
handler.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["SECOND_SIGNAL", "TurnMonitor"]

#: The signal that the thread sends.
SECOND_SIGNAL = signal.SIGRTMIN + 7

#: How often the thread looks, and how long it leaves a turn to the timer, in seconds.
_LOOK_S, _LEAVE_S = 0.5, 0.5


class TurnMonitor(threading.Thread):
    """Sends `SECOND_SIGNAL` to the thread that makes it, while a turn there is overdue.

    Args:
        overdue_s: returns for how many seconds the current turn has had no time left; negative while it has.
    """

    def __init__(self, overdue_s: Callable[[], float]) -> None:
        super().__init__(name="tracewire-turns", daemon=True)
        self._overdue_s = overdue_s
        self._thread = threading.get_ident()
        # A block may replace these in their modules.
        self._sleep, self._send = time.sleep, signal.pthread_kill

    def run(self) -> None:
        while True:
            self._sleep(_LOOK_S)
            if self._overdue_s() > _LEAVE_S:
                # A confined process may not send any; the process that waits for it ends it.
                with suppress(OSError):
                    self._send(self._thread, SECOND_SIGNAL)
