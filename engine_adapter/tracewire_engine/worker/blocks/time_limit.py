"""A block that does not come back must not hold the engine.

A block runs on the thread that runs the model: while it computes, every request waits. What each block may take is
therefore limited, step by step: all its turns within one step, wherever the model serves it, draw on one `Budget`. So
does whatever reads what it has saved or raised, which can be code of its own. A timer signal keeps the limit: it
interrupts Python code, sleeps and locks on the main thread, where vLLM's workers run the model. It cannot interrupt C
code that does not return to the interpreter, nor does it stop a block that catches everything, again and again; blocks
of people who would do that belong on an engine of their own.

What is the process's, a block can change: handlers of signals, and the modules that are loaded. It is looked at before
blocks run, and put back. A signal to end that comes in a block's turn is kept until the turn is over, since it would be
the block's error.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from greenlet import getcurrent

__all__ = [
    *(
        "BlockExit",
        "BlockTimeout",
        "Budget",
        "begin",
        "begin_step",
        "end",
        "start_shared_timer",
        "keep_modules",
        "stop_shared_timer",
    ),
    *("limit_turns", "shielded", "turn"),
]

logger = logging.getLogger("vllm.tracewire")

#: Less is not set on the timer, which takes 0 for an order to stop.
_LEAST_S = 0.001
#: A block that has taken no more of its step than this may have it once more: the timer is not set anew for it.
_SLACK_S = 0.05

_limit_s = 0.0
_building = False
_step = 0
_shielded = False
#: Whether the timer runs from one turn to the next, and whether signals are ours to handle here.
_timer_shared = False
_guarding = False
#: How the process ends when it is told to; and whether it was told to in a block's turn.
_terminate: Any = None
_told_to_end = False
#: The modules that were loaded before any block ran; those without which none runs; and how many there were before the
#: turn under way.
_modules: dict[str, ModuleType] = {}
_needed: dict[str, ModuleType] = {}
_module_count = 0
#: Functions that undo what a second import of a module has replaced.
_on_restored: list[Callable[[], None]] = []


class BlockExit(RuntimeError):
    """A block raised something that would end the process (`SystemExit`, `KeyboardInterrupt`): turned into an error."""


class BlockTimeout(Exception):
    """A block took longer in a step than the engine allows."""


class Budget:
    """The time that one block has for each step; what it has left of it."""

    __slots__ = ("left_s", "step")

    def __init__(self) -> None:
        self.step = -1
        self.left_s = 0.0


#: Whose turn is under way, and since when.
_running: Budget | None = None
_began = 0.0


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _shielded or _running is None:
        return
    left = _began + _running.left_s - time.monotonic()
    if left > 0:
        # Set for an earlier turn.
        _start(left)
        return
    # The timer may ring just after the block has parked: the model must not be hit then.
    if _building or getattr(getcurrent(), "mediator", None) is not None:
        raise BlockTimeout(
            f"the block ran for {_limit_s:g} s within one step, while every request waited for it; a loop that is to "
            "go from step to step is `for step in tracer.iter[:]`, and one that is done ends with `break`"
        )


def _keep_termination(number: int, frame: FrameType | None) -> None:
    global _told_to_end
    if _running is not None:
        _told_to_end = True
    elif callable(_terminate):
        _terminate(number, frame)
    elif _terminate == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def limit_turns(seconds: float) -> None:
    """Allow each block `seconds` of each step (0: any time), on this process's main thread. Called once, there."""
    global _limit_s, _guarding
    if threading.current_thread() is not threading.main_thread():
        logger.warning("blocks run on a thread that no timer can interrupt here: what they take has no time limit")
        return
    _limit_s = max(0.0, seconds)
    _guarding = True
    _guard()


def _guard() -> None:
    """Put the handlers of signals back, if they are not ours."""
    global _terminate
    if not _guarding or threading.current_thread() is not threading.main_thread():
        return
    if _limit_s and signal.getsignal(signal.SIGALRM) is not _interrupt:
        signal.signal(signal.SIGALRM, _interrupt)
    current = signal.getsignal(signal.SIGTERM)
    # None: it is not Python's.
    if current is not _keep_termination and current is not None:
        if _terminate is None:
            _terminate = current
        signal.signal(signal.SIGTERM, _keep_termination)


def keep_modules(prefixes: tuple[str, ...], on_restored: Callable[[], None]) -> None:
    """Put loaded modules back when a block has taken any away; those named so, also when it has put others there.

    `on_restored` is called when that was done.
    """
    _modules.update({name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)})
    _needed.update({name: module for name, module in _modules.items() if name.startswith(prefixes)})
    _on_restored[:] = [on_restored]


def _put_modules_back() -> None:
    logger.warning("a block has taken modules of the process away: they are put back")
    for name, module in _modules.items():
        sys.modules.setdefault(name, module)
    sys.modules.update(_needed)
    for restore in _on_restored:
        restore()


def begin_step() -> None:
    """A step begins, in which each block has its time anew."""
    global _step
    _step += 1
    _guard()
    if not _needed.items() <= sys.modules.items():
        _put_modules_back()
    if _guarding:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGTERM))


def begin(budget: Budget) -> Budget | None:
    """A turn of the block with this budget begins. Returns whose turn it interrupts, for `end`."""
    global _running, _began, _module_count
    now = time.monotonic()
    outer = _running
    if outer is not None:
        outer.left_s -= now - _began
    else:
        _module_count = len(sys.modules)
    if budget.step != _step:
        budget.step, budget.left_s = _step, _limit_s
    _running, _began = budget, now
    if _limit_s and (not _timer_shared or budget.left_s < _limit_s - _SLACK_S):
        _start(budget.left_s)
    return outer


def end(outer: Budget | None) -> None:
    """End this turn. The turn of `outer` goes on, if there is one."""
    global _running, _began
    now = time.monotonic()
    if _running is not None:
        _running.left_s -= now - _began
    _running, _began = outer, now
    if _limit_s and not _timer_shared:
        if outer is None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        else:
            _start(outer.left_s)
    if outer is None:
        if len(sys.modules) < _module_count and _modules:
            _put_modules_back()
        if _told_to_end:
            _end_process()


def _end_process() -> None:
    global _told_to_end
    _told_to_end = False
    _keep_termination(signal.SIGTERM, None)


def start_shared_timer() -> None:
    """Several turns follow: set the timer once for all of them. Each still has its own time."""
    global _timer_shared
    if _limit_s and _running is None:
        _guard()
        _start(_limit_s)
        _timer_shared = True


def stop_shared_timer() -> None:
    """They are over."""
    global _timer_shared
    if _timer_shared and _running is None:
        _timer_shared = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _start(seconds: float) -> None:
    # Rings again each second, for a block that swallowed the first.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S), 1.0)


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
def turn(budget: Budget | None = None, *, building: bool = False) -> Iterator[None]:
    """Run one turn of a block under the limit; `building` for what runs outside its own greenlet: what builds it, and
    what reads or frees what it has made. Without a budget it has one of its own.

    Raises:
        BlockExit: in place of what would end the process.
    """
    global _building
    before, _building = _building, building
    outer = begin(budget or Budget())
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise BlockExit(f"the block raised {type(error).__name__}") from error
    finally:
        _building = before
        end(outer)
