"""A worker whose platform built a runner that cannot interleave says so. All else of it runs in an engine only."""

from __future__ import annotations

import pytest

from tracewire_engine.worker import worker
from tracewire_engine.worker.worker import TracewireWorker


def test_a_runner_of_another_kind_is_refused_with_the_setting_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    one = object.__new__(TracewireWorker)
    monkeypatch.setattr(worker._PlatformWorker, "init_device", lambda self: setattr(self, "model_runner", object()))
    with pytest.raises(NotImplementedError, match=r"built builtins\.object\. Unset VLLM_USE_V2_MODEL_RUNNER"):
        one.init_device()


def test_the_platform_s_own_runner_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    one = object.__new__(TracewireWorker)
    theirs = object.__new__(worker._PlatformRunner)
    monkeypatch.setattr(worker._PlatformWorker, "init_device", lambda self: setattr(self, "model_runner", theirs))
    one.init_device()
    assert one.model_runner is theirs
    assert isinstance(theirs, worker.TracewireRunner)
