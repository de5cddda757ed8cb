"""Puts back what a block changed of its process, where that is cheap to look at.

Blocks of all requests, the model and vLLM share one process. So a block that sets torch's default dtype, the recursion
limit or the working directory sets them for all. This module looks at three groups of such settings. Those on which the
code of the next block depends are compared after each turn with their values before. Those on which the model depends
are compared when the blocks that wait for one location have run. All others are compared at the beginning of each step
that has blocks, with their values when the engine began to serve. A setting is set again only if it differs, and the
log says so.

A block can change much that is not looked at: weights, classes and functions of loaded modules, its parent's memory.
`docs/isolation.md` lists what inline blocks are not kept from.
"""

from __future__ import annotations

import decimal
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from tracewire_engine.worker.switch_interval import set_switch_interval

__all__ = ["keep", "pass_state", "put_back_pass", "put_back_step", "put_back_turn", "recursion_limit", "turn_state"]

logger = logging.getLogger("vllm.tracewire")

_C: Any = torch._C

#: Settings by name, each with a function that sets it.
_Settings: TypeAlias = tuple[tuple[str, Callable[[Any], Any]], ...]

#: The names of settings whose change was logged as a warning. Later changes of these are logged for debugging only.
_told: set[str] = set()


def _tell(name: str) -> None:
    level = logging.DEBUG if name in _told else logging.WARNING
    _told.add(name)
    logger.log(level, "a block changed the process's %s, which is put back", name)


# --- after each turn, and after the turns of one location -----------------------------------------------------------

_dtype, _inference, _functions = torch.get_default_dtype, torch.is_inference_mode_enabled, _C._len_torch_function_stack
_threads, _deterministic, _dispatches = (
    torch.get_num_threads,
    _C._get_deterministic_algorithms,
    _C._len_torch_dispatch_stack,
)
_mkldnn, _collects, _depth = _C._get_mkldnn_enabled, gc.isenabled, sys.getrecursionlimit
_autocast = _C._is_any_autocast_enabled

#: The smallest positive number, which is 0 in arithmetic that flushes denormal numbers.
_LEAST = 5e-324


def turn_state() -> tuple[Any, ...]:
    """The settings that are put back after each turn, since the code of the next block depends on them."""
    return _dtype(), _inference(), _functions()


def pass_state() -> tuple[Any, ...]:
    """The settings that are put back when the blocks of one location have run, since the model depends on them."""
    return (
        *(_threads(), _deterministic(), _dispatches(), _mkldnn()),
        *(_collects(), _depth(), _LEAST * 1.0 == 0.0, _autocast()),
    )


def put_back_turn(before: tuple[Any, ...]) -> None:
    """Set the settings again that differ from `before`, what `turn_state` returned before the turn."""
    _put_back(_TURN, before, turn_state())


def put_back_pass(before: tuple[Any, ...]) -> None:
    """Set the settings again that differ from `before`, what `pass_state` returned before the turns."""
    _put_back(_PASS, before, pass_state())


def _put_back(settings: _Settings, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    for (name, restore), was, found in zip(settings, before, now, strict=True):
        if was != found:
            _tell(name)
            restore(was)


def _set_inference(on: bool) -> None:
    # The guard sets the mode back when it is freed, so it is never freed.
    _guards.append(_C._InferenceMode(on))


_guards: list[Any] = []


def _pop_functions(count: int) -> None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is not None and _functions() > count:
        torch.set_default_device(None)
    while _functions() > count:
        _C._pop_torch_function_stack()


def _pop_dispatches(count: int) -> None:
    while _dispatches() > count:
        _C._pop_torch_dispatch_stack(None)


def _set_autocast(on: bool) -> None:
    if not on:
        for device in ("cpu", "cuda"):
            torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def _set_collects(on: bool) -> None:
    (gc.enable if on else gc.disable)()


_TURN: _Settings = (
    ("default dtype", torch.set_default_dtype),
    ("inference mode", _set_inference),
    ("torch function modes", _pop_functions),
)

_PASS: _Settings = (
    ("number of torch's threads", torch.set_num_threads),
    ("deterministic algorithms", _C._set_deterministic_algorithms),
    ("torch dispatch modes", _pop_dispatches),
    ("use of oneDNN", _C._set_mkldnn_enabled),
    ("garbage collection", _set_collects),
    ("recursion limit", sys.setrecursionlimit),
    ("flushing of denormal numbers", torch.set_flush_denormal),
    ("autocast", _set_autocast),
)


def recursion_limit() -> int:
    """The recursion limit when the engine began to serve."""
    return _limit


_limit = sys.getrecursionlimit()


# --- at the beginning of each step ------------------------------------------------------------------------------------


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # the folder is gone
        return None


def _umask() -> int:
    # Only a call that sets it tells what it was.
    now = os.umask(_kept_umask)
    if now != _kept_umask:
        os.umask(now)
    return now


def _environment() -> dict[Any, Any]:
    return os.environ._data  # type: ignore[attr-defined, no-any-return]


def _set_environment(was: dict[Any, Any]) -> None:
    now = _environment()
    for name in now.keys() - was.keys():
        del os.environb[name]
    for name, value in was.items():
        if now.get(name) != value:
            os.environb[name] = value


def _set_seed(_: int) -> None:
    torch.default_generator.set_state(_kept_generator)


def _set_filters(was: list[Any]) -> None:
    warnings.filters[:] = was  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _set_streams(was: tuple[Any, ...]) -> None:
    sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.displayhook = was


def _paths() -> tuple[list[Any], list[Any], list[Any]]:
    return sys.path, sys.meta_path, sys.path_hooks


def _lacks_paths() -> bool:
    """Whether an entry of the import path is gone. Further entries, such as those of an imported package, stay."""
    return _paths() != _kept_paths and any(
        entry not in held for held, kept in zip(_paths(), _kept_paths, strict=True) for entry in kept
    )


def _set_paths(_: bool) -> None:
    for held, kept in zip(_paths(), _kept_paths, strict=True):
        held[:] = [*kept, *(entry for entry in held if entry not in kept)]


_STEP: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("working directory", _cwd, os.chdir),
    ("umask", _umask, os.umask),
    ("environment", _environment, _set_environment),
    ("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    ("torch seed", torch.default_generator.initial_seed, _set_seed),
    ("precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("switch interval", sys.getswitchinterval, set_switch_interval),
    ("thresholds of garbage collection", gc.get_threshold, lambda was: gc.set_threshold(*was)),
    ("limit of integers' text", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    ("level of disabled logging", lambda: logging.root.manager.disable, logging.disable),
    ("filters of warnings", lambda: warnings.filters, _set_filters),
    (
        "standard streams and hooks",
        lambda: (sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.displayhook),
        _set_streams,
    ),
    ("import path", _lacks_paths, _set_paths),
    ("precision of decimal numbers", lambda: decimal.getcontext().prec, lambda was: _set_precision(was)),
    ("handling of NumPy's errors", np.geterr, lambda was: np.seterr(**was)),
)


def _set_precision(was: int) -> None:
    decimal.getcontext().prec = was


_kept: list[Any] = []
_kept_pass: tuple[Any, ...] = ()
_kept_paths: tuple[list[Any], ...] = ([], [], [])
_kept_umask = 0o22
_kept_generator = torch.default_generator.get_state()


def keep() -> None:
    """Remember the settings of this process, which are put back from then on. Called before any block runs."""
    global _kept_umask, _kept_generator, _kept_pass, _kept_paths, _limit
    _kept_umask = os.umask(0o22)
    os.umask(_kept_umask)
    _kept_generator = torch.default_generator.get_state()
    _limit = sys.getrecursionlimit()
    _kept_pass, _kept_paths = pass_state(), tuple(map(_copied, _paths()))
    _kept[:] = [_copied(look()) for _, look, _ in _STEP]


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if isinstance(value, dict | list) else value


def put_back_step() -> None:
    """Set the settings again that differ from those that `keep` remembered. Does nothing before `keep`."""
    if not _kept:
        return
    if pass_state() != _kept_pass:
        put_back_pass(_kept_pass)
    for (name, look, restore), was in zip(_STEP, _kept, strict=True):
        if look() != was:
            _tell(name)
            with suppress(OSError):  # the working directory may be gone
                restore(was)
