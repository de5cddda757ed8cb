"""The thread signals a turn that is overdue, and no other."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from tracewire_engine.worker.blocks import turn_monitor
from tracewire_engine.worker.blocks.turn_monitor import SECOND_SIGNAL, TurnMonitor


def test_an_overdue_turn_is_signalled_on_the_thread_that_made_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_monitor, "_LOOK_S", 0.001)
    overdue, got, looked = [-1.0], threading.Event(), threading.Semaphore(0)

    def overdue_s() -> float:
        looked.release()
        return overdue[0]

    def rings(number: int, frame: Any) -> None:
        overdue[0] = -1.0
        got.set()

    before = signal.signal(SECOND_SIGNAL, rings)
    try:
        TurnMonitor(overdue_s).start()
        for seconds in (-1.0, turn_monitor._LEAVE_S):
            overdue[0] = seconds
            for _ in range(3):
                assert looked.acquire(timeout=30)
        assert not got.is_set()
        overdue[0] = 1e9
        assert got.wait(30)
    finally:
        overdue[0] = -1.0
        # A look before this may still send a signal. The next one comes after that.
        while looked.acquire(blocking=False):
            pass
        for _ in range(2):
            assert looked.acquire(timeout=30)
        signal.signal(SECOND_SIGNAL, before)
