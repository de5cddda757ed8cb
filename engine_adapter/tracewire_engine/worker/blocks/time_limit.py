"""Limits the time that a block takes, so that no block can stall the engine.

A block runs on the thread that runs the model, and every request waits while it computes. So each block has a `Budget`
of time for each step, which all its turns in the step share, wherever the model serves it. Code that reads what a block
has saved or raised runs under a limit too, because reading can call the block's own methods. A timer signal enforces
the limit: it interrupts Python code, sleeps and locks on the main thread, where vLLM's workers run the model. It cannot
interrupt C code that does not return to the interpreter, nor does it stop a block that catches every exception again
and again. Run blocks of less trusted users on a separate engine.

A block can change state of the process. Its signal handlers and loaded modules are checked before blocks run, and put
back; `process_state.py` puts back more. If a block ignores the timer's signal, a thread sends another signal a little
later (`turn_monitor.py`); in a process that runs blocks only, a second timer does (`second_timer.py`). If a block
swallows the first exception of the time limit, later ones come in pairs: a trace function raises the second one in the
block's handler of the first, which ends a loop that catches everything. If a SIGTERM comes during a block's turn, the
process handles it when the turn is over, because the handler's exception would otherwise be raised in the block.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any

from greenlet import getcurrent

from . import forbidden_calls, process_state
from .compiled_source import LABELS
from .second_timer import SecondTimer
from .turn_monitor import SECOND_SIGNAL, TurnMonitor

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
        "left_together",
        "limit_together",
        "stop_shared_timer",
        "timer_once",
    ),
    *("limit_turns", "shielded", "timeout", "turn"),
]

logger = logging.getLogger("vllm.tracewire")

#: `signal.getsignal`, but it does not search for a name of the handler, which takes longer than all else in a step.
_handler_of: Callable[[int], Any] = signal._signal.getsignal  # type: ignore[attr-defined]

#: The shortest time that is set on the timer, since 0 would stop it.
_LEAST_S = 0.001
#: How much later than the first timer the second one rings, in seconds.
_LATER_S = 0.005
#: How long after the first timer's ring the place of a block is noted, in seconds; and the signal that is sent then.
_PLACE_S = 0.01
_PLACE_SIGNAL = signal.SIGRTMIN + 8
#: While the timer is shared, it is set anew for a block only if the block has used more of its time than this.
_SLACK_S = 0.05

#: How long a block may take at least although the blocks of its process have used up their common time, in seconds.
_LEAST_SHARE_S = 0.05

#: Until when the turns of all blocks may take (`time.monotonic()`), if they have a common limit.
_until: float | None = None
_limit_s = 0.0
_monitor: TurnMonitor | None = None
_building = False
_step = 0
_shielded = False
#: The second timer of a process that runs blocks only, and the one that notes where the block is.
_second: SecondTimer | None = None
_places: SecondTimer | None = None
#: Whether one setting of the timer serves several turns, and whether this module handles the process's signals.
_timer_shared = False
#: Whether the next turn begins that, and only `timer_once` ends it; and whether the timer has rung between two turns.
_shares_next = False
_rang_idle = False
_guarding = False
#: The handler of SIGTERM that was there before this module's; and whether a SIGTERM came during a block's turn.
_terminate: Any = None
_told_to_end = False
#: The modules that were loaded before any block ran; those of them that blocks need to run; and how many modules were
#: loaded before the current turn.
_modules: dict[str, ModuleType] = {}
_needed: dict[str, ModuleType] = {}
_module_count = 0
#: Further modules that are put back if a block has replaced them in `sys.modules`.
_ALSO = frozenset(
    {"builtins", "os", "sys", "time", "signal", "threading", "logging", "torch", "numpy", "vllm", "msgspec", "zmq"}
)
#: Functions that undo what a second import of a module has replaced.
_on_restored: list[Callable[[], None]] = []


class BlockExit(RuntimeError):
    """Stands for an exception of a block that would end the process, such as `SystemExit` or `KeyboardInterrupt`."""


class BlockTimeout(Exception):
    """A block took longer in a step than the engine allows."""


class Budget:
    """The time that one block may still take in a step: `left_s` seconds of the step numbered `step`."""

    __slots__ = ("cut", "left_s", "rings", "step")

    def __init__(self) -> None:
        self.step = -1
        self.left_s = 0.0
        #: How often the time limit has interrupted it in the step; and whether other blocks have used up its time.
        self.rings = 0
        self.cut = False


#: The budget of the block whose turn is running, and since when (`time.monotonic()`).
_running: Budget | None = None
_began = 0.0
#: The process's state before the turn, and before the turns of one location; `None` if it is not looked at.
_before: tuple[Any, ...] | None = None
_before_pass: tuple[Any, ...] | None = None
#: Whether the turn that is running had that state looked at, so that its end compares it.
_noted_by_turn = False
#: Whether the trace function is set that raises the second exception of a pair.
_pairing = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _rang_idle
    _rang_idle = _running is None
    if _shielded or _running is None:
        return
    left = _began + _running.left_s - time.monotonic()
    if left > 0:
        # The timer was set for an earlier turn.
        _start(left)
        return
    # The timer may ring just after the block has parked: the model must not be hit then.
    if _building or getattr(getcurrent(), "mediator", None) is not None:
        _running.rings += 1
        if _second is not None and number == signal.SIGALRM:
            # The first timer serves.
            _second.start(1.0 + _LATER_S)
        if _running.rings > 1 and frame is not None and _is_block_s(frame):
            _raise_again_in(frame)
        raise timeout()


def timeout() -> BlockTimeout:
    """The error of the running block, whose time is up."""
    if _running is not None and _running.cut:
        return BlockTimeout(
            f"the blocks of this tenant that share a process ran for {_limit_s:g} s within one step, this one last"
        )
    return BlockTimeout(
        f"the block ran for {_limit_s:g} s within one step, while every request waited for it; to loop over the "
        "steps write `for step in tracer.iter[:]`, and leave a loop that is done with `break`"
    )


def _is_block_s(frame: FrameType) -> bool:
    """Whether a frame runs code of a block."""
    return frame.f_code.co_filename in LABELS


def _raise_again_in(frame: FrameType) -> None:
    """Raise another exception at the next line that the frame comes to: that of its handler of the first one."""
    global _pairing
    _pairing = True
    frame.f_trace = _raise_at_line
    sys.settrace(_raise_at_line)


def _raise_at_line(frame: FrameType, event: str, _: Any) -> Any:
    if not _is_block_s(frame):
        return None
    if event == "line" and _running is not None:
        raise timeout()
    return _raise_at_line


def _keep_termination(number: int, frame: FrameType | None) -> None:
    global _told_to_end
    if _running is not None:
        _told_to_end = True
    elif callable(_terminate):
        _terminate(number, frame)
    elif _terminate == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def limit_turns(seconds: float, *, alone: bool = False) -> None:
    """Limit the time of each block in each step. Called once, on the process's main thread.

    On another thread no timer can interrupt blocks; this then logs a warning and sets no limit.

    Args:
        seconds: 0 for no limit.
        alone: whether the process runs blocks only, and another process ends it if the signal is of no avail.
    """
    global _limit_s, _guarding, _monitor, _second
    if threading.current_thread() is not threading.main_thread():
        logger.warning("blocks run without a time limit: they are not on the main thread, where a timer can interrupt")
        return
    _limit_s = max(0.0, seconds)
    _guarding = True
    _guard()
    forbidden_calls.install(lambda: _running is not None)
    if alone and _second is None:
        with suppress(OSError):  # then another process ends this one
            _second = SecondTimer(SECOND_SIGNAL)
    if _limit_s and _monitor is None and not alone:
        _monitor = TurnMonitor(_overdue_s)
        with suppress(RuntimeError):  # a confined process may not start a thread
            _monitor.start()


def note_places(descriptor: int) -> None:
    """Note where a block is whose time is over, for the process that ends this one.

    C code that does not return to Python lets no handler of Python's run. So one of C's writes the lines.

    Args:
        descriptor: takes the lines as text, and does not block.
    """
    global _places
    with suppress(OSError):  # then the error names no line
        _places = SecondTimer(_PLACE_SIGNAL)
        faulthandler.register(_PLACE_SIGNAL, descriptor, all_threads=False)


def limit_together(seconds: float | None) -> None:
    """Limit the time that all blocks together may take from now on. `None`: each has its own limit only."""
    global _until
    _until = None if seconds is None else time.monotonic() + seconds


def left_together() -> float:
    """How many seconds all blocks together have left; infinite without such a limit."""
    return math.inf if _until is None else _until - time.monotonic()


def _overdue_s() -> float:
    """For how many seconds the current turn has had no time left; negative if it has time, or there is no turn."""
    running = _running
    return -1.0 if running is None or not _limit_s or _shielded else time.monotonic() - _began - running.left_s


def _guard() -> None:
    """Install this module's signal handlers, if others are installed."""
    global _terminate
    if not _guarding or threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGALRM, SECOND_SIGNAL) if _limit_s else ():
        if _handler_of(number) is not _interrupt:
            signal.signal(number, _interrupt)
    current = _handler_of(signal.SIGTERM)
    # None: the handler was not installed from Python.
    if current is not _keep_termination and current is not None:
        if _terminate is None:
            _terminate = current
        signal.signal(signal.SIGTERM, _keep_termination)


def keep_modules(prefixes: tuple[str, ...], on_restored: Callable[[], None]) -> None:
    """Remember the loaded modules, to put them back if a block removes any.

    Args:
        prefixes: of the names of modules that are also put back if a block has replaced them.
        on_restored: is called after modules were put back.
    """
    _modules.update({name: module for name, module in sys.modules.items() if isinstance(module, ModuleType)})
    needed = {name for name in _modules if name.startswith(prefixes) or name in _ALSO}
    _needed.update({name: _modules[name] for name in needed})
    _on_restored[:] = [on_restored]


def _put_modules_back() -> None:
    logger.warning("a block has removed or replaced modules of the process in sys.modules; they are put back")
    for name, module in _modules.items():
        sys.modules.setdefault(name, module)
    sys.modules.update(_needed)
    for restore in _on_restored:
        restore()


def begin_step() -> None:
    """Begin a step: each block has its full time again. Puts back what blocks have changed of the process."""
    global _step
    _step += 1
    _guard()
    process_state.put_back_step()
    if not _needed.items() <= sys.modules.items():
        _put_modules_back()
    if _guarding:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM, signal.SIGTERM, SECOND_SIGNAL, signal.SIGVTALRM))


def begin(budget: Budget) -> Budget | None:
    """Begin a turn of the block with this budget.

    Returns:
        The budget of the turn that this one interrupts, if any; pass it to `end`.
    """
    global _running, _began, _module_count, _noted_by_turn, _rang_idle
    outer = _running
    if _shares_next and outer is None and not _timer_shared:
        _share_timer()
    now = time.monotonic()
    if outer is not None:
        outer.left_s -= now - _began
    else:
        _module_count = len(sys.modules)
        if _before is None and not _building:
            _note_state()
            _noted_by_turn = True
    if budget.step != _step:
        budget.step, budget.left_s, budget.rings, budget.cut = _step, _limit_s, 0, False
    if _until is not None and (share := max(_until - now, _LEAST_SHARE_S)) < budget.left_s - _SLACK_S:
        budget.left_s, budget.cut = share, True
    _running, _began = budget, now
    if _limit_s and (not _timer_shared or _rang_idle or budget.left_s < _limit_s - _SLACK_S):
        _rang_idle = False
        _start(budget.left_s)
    return outer


def end(outer: Budget | None) -> None:
    """End the current turn, and continue the turn that it interrupted, whose budget is `outer`."""
    global _running, _began, _noted_by_turn
    now = time.monotonic()
    if _running is not None:
        _running.left_s -= now - _began
    _running, _began = outer, now
    if _limit_s and not _timer_shared:
        if outer is None:
            _stop()
        else:
            _start(outer.left_s)
    if outer is None:
        if _pairing:
            _stop_pairing()
        if _before is not None and process_state.turn_state() != _before:
            process_state.put_back_turn(_before)
        if _noted_by_turn:
            _noted_by_turn = False
            _check_pass()
        if len(sys.modules) < _module_count and _modules:
            _put_modules_back()
        if _told_to_end:
            _end_process()


def _stop_pairing() -> None:
    global _pairing
    _pairing = False
    sys.settrace(None)


def _note_state() -> None:
    global _before, _before_pass
    _before, _before_pass = process_state.turn_state(), process_state.pass_state()


def _check_pass() -> None:
    """Put back what the turns since `_note_state` have changed."""
    global _before, _before_pass
    before, _before, _before_pass = _before_pass, None, None
    if before is not None and process_state.pass_state() != before:
        process_state.put_back_pass(before)


def _end_process() -> None:
    global _told_to_end
    _told_to_end = False
    _keep_termination(signal.SIGTERM, None)


def start_shared_timer() -> None:
    """Set the timer once for the turns that follow, until `stop_shared_timer`. Each still has a budget of its own."""
    if _limit_s and _running is None:
        _guard()
        if not _timer_shared:
            _share_timer()
        _note_state()


def _share_timer() -> None:
    global _timer_shared
    if _limit_s:
        _start(_limit_s)
        _timer_shared = True


def stop_shared_timer() -> None:
    """Stop the timer that `start_shared_timer` set, unless `timer_once` does so later. Puts back what turns changed."""
    global _timer_shared
    if _timer_shared and _running is None:
        _check_pass()
        if not _shares_next:
            _timer_shared = False
            _stop()


@contextmanager
def timer_once() -> Iterator[None]:
    """Set the timer once for all turns of this context, with the first of them if there is any."""
    global _shares_next
    before, _shares_next = _shares_next, True
    try:
        yield
    finally:
        _shares_next = before
        stop_shared_timer()


def _start(seconds: float) -> None:
    # The timer fires again each second, for a block that swallowed the first exception.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S), 1.0)
    if _second is not None:
        # For a block that has stopped the first timer, or ignores its signal.
        _second.start(max(seconds, _LEAST_S) + _LATER_S)
    if _places is not None:
        _places.start(max(seconds, _LEAST_S) + _PLACE_S)


def _stop() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if _second is not None:
        _second.stop()
    if _places is not None:
        _places.stop()


@contextmanager
def shielded(*, waiting: bool = False) -> Iterator[None]:
    """Keep the time limit from interrupting this context. A block whose time is up is interrupted within 1 s after it.

    Args:
        waiting: whether the context waits for other processes, which does not count as the block's time.
    """
    global _began, _shielded, _until
    _shielded, since = True, time.monotonic()
    try:
        yield
    finally:
        _shielded = False
        if waiting:
            waited = time.monotonic() - since
            _began += waited
            _until = None if _until is None else _until + waited


@contextmanager
def turn(budget: Budget | None = None, *, building: bool = False) -> Iterator[None]:
    """Run one turn of a block under the time limit.

    Args:
        budget: of the block; without one the turn has a full budget of its own.
        building: whether the code runs outside the block's greenlet, as code does that builds a block, or reads or
            frees its objects.

    Raises:
        BlockTimeout: the time is up.
        BlockExit: the code raised an exception that would end the process.
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
