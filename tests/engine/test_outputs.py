"""What vLLM's queue of a request's outputs hands over in place of outputs."""

# mypy: ignore-errors

from __future__ import annotations

import anyio
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tracewire_engine.adapter.engine_api import EngineLost, Rejection
from tracewire_engine.adapter.vllm_engine import _VllmOutputs


class Queue:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_nowait(self) -> None:
        return None

    async def get(self) -> None:
        raise self.error


def test_what_engine_core_refuses_is_the_request_s_own_error() -> None:
    refused = VLLMValidationError("no grammar", parameter="structured_outputs", value="(")
    with pytest.raises(Rejection) as raised:
        anyio.run(_VllmOutputs(Queue(refused)).get)
    assert raised.value.failure.field == "sampling.structured_outputs"
    assert "no grammar" in raised.value.failure.message


def test_a_dead_engine_is_lost() -> None:
    with pytest.raises(EngineLost):
        anyio.run(_VllmOutputs(Queue(EngineDeadError())).get)
