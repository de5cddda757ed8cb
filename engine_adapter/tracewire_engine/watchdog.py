"""A block that does not come back must not hold the engine.

A block runs on the thread that runs the model: while it computes, every request waits. A loop that never asks the
model for anything (`for step in tracer.iter[:]` over a body that reads nothing is one) would hang the engine for
everybody. Each turn of a block therefore has a time limit, kept by a timer signal, which interrupts Python code,
sleeps and locks on the main thread, where vLLM's workers run the model. It cannot interrupt C code that does not
return to the interpreter, nor does it stop a block that catches everything, again and again; blocks of people who
would do that belong on an engine of their own.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from greenlet import getcurrent

__all__ = ["BlockTimeout", "begin", "end", "hold", "let_go", "limit_turns", "shielded", "turn"]

logger = logging.getLogger("vllm.tracewire")

_limit_s = 0.0
_building = False
_shielded = False
#: When the turn under way began, and whether the timer runs from one turn to the next.
_began = 0.0
_held = False


class BlockTimeout(Exception):
    """A block's turn took longer than the engine allows."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _shielded:
        return
    left = _began + _limit_s - time.monotonic()
    if left > 0:
        # Set for an earlier turn.
        signal.setitimer(signal.ITIMER_REAL, left, 1.0)
        return
    # The timer may ring just after the block has parked: the model must not be hit then.
    if _building or getattr(getcurrent(), "mediator", None) is not None:
        raise BlockTimeout(
            f"the block ran for {_limit_s:g} s without asking the model for anything; every request waits while it does"
        )


def limit_turns(seconds: float) -> None:
    """Allow each turn of a block `seconds` (0: any time), on this process's main thread. Called once, there."""
    global _limit_s
    if seconds <= 0:
        return
    if threading.current_thread() is not threading.main_thread():
        logger.warning("blocks run on a thread that no timer can interrupt here: their turns have no time limit")
        return
    signal.signal(signal.SIGALRM, _interrupt)
    _limit_s = seconds


def begin() -> None:
    """A turn of a block begins."""
    global _began
    if not _limit_s:
        return
    _began = time.monotonic()
    if not _held:
        _start()


def end() -> None:
    """It is over."""
    if _limit_s and not _held:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def hold() -> None:
    """Several turns follow: set the timer once for all of them. Each still has the whole time."""
    global _began, _held
    if _limit_s:
        _began = time.monotonic()
        _start()
        _held = True


def let_go() -> None:
    """They are over."""
    global _held
    if _limit_s:
        _held = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _start() -> None:
    # Rings again each second, for a block that swallowed the first.
    signal.setitimer(signal.ITIMER_REAL, _limit_s, 1.0)


@contextmanager
def shielded(*, waiting: bool = False) -> Iterator[None]:
    """Let nothing be interrupted meanwhile: what has run out of its time is, within a second, afterwards.

    `waiting` for others is no part of a block's time.
    """
    global _began, _shielded
    _shielded, since = True, time.monotonic()
    try:
        yield
    finally:
        _shielded = False
        if waiting:
            _began += time.monotonic() - since


@contextmanager
def turn(*, building: bool = False) -> Iterator[None]:
    """Run one turn of a block under the limit; `building` for what is run to build it, outside its own greenlet."""
    global _building
    _building = building
    begin()
    try:
        yield
    finally:
        _building = False
        end()
