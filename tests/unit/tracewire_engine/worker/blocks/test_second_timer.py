"""The second timer: its signal comes although the first timer is stopped and its signal ignored."""

from __future__ import annotations

import signal

from tracewire_engine.worker.blocks.second_timer import SecondTimer
from tracewire_engine.worker.blocks.turn_monitor import SECOND_SIGNAL


def test_its_signal_comes_until_it_is_stopped() -> None:
    timer = SecondTimer(SECOND_SIGNAL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SECOND_SIGNAL})
    try:
        timer.start(0.01)
        # It comes again.
        for _ in range(2):
            assert signal.sigtimedwait({SECOND_SIGNAL}, 30) is not None
        timer.stop()
        signal.sigtimedwait({SECOND_SIGNAL}, 0)
        assert signal.sigtimedwait({SECOND_SIGNAL}, 0) is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
