"""A worker extends the runner that vLLM built, or says why it cannot. All else of it runs in an engine only."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracewire_engine.worker import worker
from tracewire_engine.worker.worker import TracewireWorker


def test_a_runner_of_another_kind_is_refused_with_the_setting_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    one = object.__new__(TracewireWorker)
    monkeypatch.setattr(worker._PlatformWorker, "init_device", lambda self: setattr(self, "model_runner", object()))
    with pytest.raises(NotImplementedError, match=r"built builtins\.object"):
        one.init_device()


def test_the_platform_s_own_runner_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    one = object.__new__(TracewireWorker)
    theirs = object.__new__(CPUModelRunner)
    monkeypatch.setattr(worker._PlatformWorker, "init_device", lambda self: setattr(self, "model_runner", theirs))
    one.init_device()
    assert one.model_runner is theirs
    assert isinstance(theirs, worker.TracewireRunner)


def test_the_core_imports_neither_nnsight_s_runner_nor_its_worker() -> None:
    """Both import vLLM's first runner, which a later version of vLLM may not have."""
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tracewire_engine, tracewire_engine.worker.runner\n"
            "print([name for name in sys.modules if name.startswith('nnsight.modeling.vllm.model_runners.') "
            "or name.startswith('nnsight.modeling.vllm.workers.') or name == 'vllm.v1.worker.gpu_model_runner'])",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip().splitlines()[-1] == "[]", said.stderr
