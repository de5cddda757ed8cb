"""Constraints of sampling are checked by vLLM once, on a thread, within a time limit."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from tracewire_bus.wire.messages import Invoke
from tracewire_engine.adapter.engine_api import Prepared

PATIENCE = 60


class Params:
    """vLLM's check of a constraint, played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event | None = None) -> None:
        self.vllm_engine = pytest.importorskip("tracewire_engine.adapter.vllm_engine")
        self.sampling = pytest.importorskip("tracewire_engine.adapter.sampling")
        self.threads: list[int] = []
        self.began = threading.Event()
        self._hangs = hangs
        monkeypatch.setattr(self.vllm_engine.SamplingParams, "verify", self._verify())
        self.engine = object.__new__(self.vllm_engine.VllmEngine)
        self.engine._traced = {}
        config = SimpleNamespace(model_config=None, speculative_config=None, structured_outputs_config=None)
        processor = SimpleNamespace(tokenizer=None)
        self.engine.llm = SimpleNamespace(vllm_config=config, input_processor=processor, add_request=self._add)
        self.engine._constraints = self.sampling.ConstraintChecks(self.engine.llm)

    def _verify(self) -> Any:
        def verify(params: Any, *configs: Any) -> None:
            if params.structured_outputs is not None:
                self.threads.append(threading.get_ident())
                self.began.set()
                if self._hangs is not None:
                    self._hangs.wait(PATIENCE)

        return verify

    async def _add(self, request: str, prompt: Any, params: Any, **_: Any) -> Any:
        # On the event loop, as vLLM does it.
        params.verify(None, None, None, None)
        assert params.clone().structured_outputs.regex == "a+"

    async def start(self) -> None:
        """A request whose constraint vLLM looks at."""
        params = self.sampling.sampling_params(Invoke(prompt="x", sampling={"structured_outputs": {"regex": "a+"}}), "")
        await self.engine.start("r", Prepared(None, 1, params, 1, {}), 0)


async def test_vllm_looks_at_a_constraint_once_and_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Params(monkeypatch)
    await played.start()
    assert len(played.threads) == 1
    assert played.threads[0] != threading.get_ident()


async def test_a_constraint_that_vllm_looks_at_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    played = Params(monkeypatch, hangs)
    monkeypatch.setattr(played.sampling, "CONSTRAINT_S", 0.05)
    try:
        with anyio.fail_after(PATIENCE), pytest.raises(played.vllm_engine.Rejection) as caught:
            await played.start()
        assert played.began.is_set()
        assert caught.value.failure.field == "sampling.structured_outputs"
        assert "0.05 s" in caught.value.failure.message
    finally:
        hangs.set()
