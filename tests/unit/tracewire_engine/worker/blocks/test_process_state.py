"""What a block changed of its process is put back: each setting is really changed, and looked at afterwards."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tracewire_engine.worker.blocks import process_state


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings as they are now, as if the engine began to serve."""
    monkeypatch.setattr(process_state, "_told", set())
    process_state.keep()
    yield
    process_state.put_back_step()
    process_state._kept.clear()


#: Modes that are switched on, and are not freed.
_held: list[Any] = []


def _enter(mode: Any) -> None:
    mode.__enter__()
    _held.append(mode)


class _FunctionMode(torch.overrides.TorchFunctionMode):
    pass


class _DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    pass


#: What changes each setting that is put back after a turn, and what looks at it.
TURN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "inference mode": (lambda: _enter(torch.inference_mode(False)), torch.is_inference_mode_enabled),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 3), torch.get_num_threads),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "function mode": (lambda: _enter(_FunctionMode()), torch._C._len_torch_function_stack),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "dispatch mode": (lambda: _enter(_DispatchMode()), torch._C._len_torch_dispatch_stack),
    "onednn": (lambda: torch._C._set_mkldnn_enabled(False), torch._C._get_mkldnn_enabled),
    "autocast": (lambda: _enter(torch.autocast("cpu", torch.bfloat16)), lambda: torch.is_autocast_enabled("cpu")),
    "gc": (gc.disable, gc.isenabled),
    "recursion": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.tensor([1e-40]).mul(1.0).item() > 0,
    ),
}


@pytest.mark.parametrize("name", TURN)
def test_a_setting_is_put_back_after_a_turn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, look = TURN[name]
    with torch.inference_mode():
        turn, whole, was = process_state.turn_state(), process_state.pass_state(), look()
        change()
        assert look() != was
        assert (process_state.turn_state(), process_state.pass_state()) != (turn, whole)
        for _ in range(2):
            process_state.put_back_turn(turn)
            process_state.put_back_pass(whole)
        assert look() == was
        assert (process_state.turn_state(), process_state.pass_state()) == (turn, whole)
    assert len(caplog.records) == 1


def test_what_a_finalizer_changed_is_put_back_at_the_next_step() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    process_state.put_back_step()
    assert torch.get_num_threads() == before


STEP: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "umask": (lambda: os.umask(0o777), process_state._umask),
    "environment": (
        lambda: (os.environ.update(TRACEWIRE_LEFT="1"), os.environ.pop("PATH")),
        lambda: {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    ),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "seed": (lambda: torch.manual_seed(4711), torch.initial_seed),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "switch interval": (lambda: sys.setswitchinterval(100.0), sys.getswitchinterval),
    "gc thresholds": (lambda: gc.set_threshold(1, 1, 1), gc.get_threshold),
    "integers": (lambda: sys.set_int_max_str_digits(640), sys.get_int_max_str_digits),
    "logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "streams": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "hook": (lambda: setattr(sys, "unraisablehook", None), lambda: sys.unraisablehook),
    "import path": (lambda: (sys.path.clear(), sys.meta_path.clear()), lambda: (list(sys.path), list(sys.meta_path))),
    "decimal": (lambda: setattr(decimal.getcontext(), "prec", 1), lambda: decimal.getcontext().prec),
    "numpy": (lambda: np.seterr(all="raise"), np.geterr),
}


@pytest.mark.parametrize("name", STEP)
def test_a_setting_is_put_back_at_the_next_step(name: str) -> None:
    change, look = STEP[name]
    was = look()
    change()
    assert look() != was
    process_state.put_back_step()
    assert look() == was


def test_what_a_package_adds_to_the_import_path_stays() -> None:
    before = list(sys.meta_path)

    class Finder:
        def find_spec(self, *_: Any) -> None:
            return None

    added = Finder()
    sys.meta_path.append(added)
    process_state.put_back_step()
    assert sys.meta_path[-1] is added
    sys.meta_path.clear()
    sys.meta_path.append(added)
    process_state.put_back_step()
    assert sys.meta_path == [*before, added]
    sys.meta_path.remove(added)


def test_a_working_directory_that_is_gone_is_left(tmp_path: Path) -> None:
    was = Path.cwd()
    folder = tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    process_state.put_back_step()
    assert Path.cwd() == was


def test_nothing_is_put_back_before_the_engine_serves() -> None:
    process_state._kept.clear()
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.25)
    process_state.put_back_step()
    assert sys.getswitchinterval() == 0.25
    sys.setswitchinterval(before)


def test_the_recursion_limit_is_that_of_the_beginning() -> None:
    assert process_state.recursion_limit() == sys.getrecursionlimit()
