"""What vLLM's queue of a request's outputs hands over in place of outputs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tracewire_bus.wire.messages import Drafts, Invoke, Submission
from tracewire_engine.adapter.engine_api import EngineLost, Rejection
from tracewire_engine.adapter.runner_bounds import RunnerBounds
from tracewire_engine.adapter.vllm_engine import VllmEngine, _drafts, _VllmOutputs
from tracewire_engine.launch.cli import _untapped
from tracewire_engine.protocol.keys import BLOCK_ARG, DECLARED_ARG, DRAFTS_ARG, FORCED_ARG


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


TAP = "model.model.layers.2.output"


def test_an_engine_with_graphs_without_taps_is_refused() -> None:
    async def call(method: str, args: tuple[Any, ...]) -> list[list[str]]:
        assert method == "tracewire_untapped"
        return [[], ["CUDAGraphWrapper: 4 requests"]]

    engine = object.__new__(VllmEngine)
    engine._patience_s, engine._adapter = 60.0, 0
    engine.llm = SimpleNamespace(collective_rpc=call)
    engine.model = SimpleNamespace(taps=(TAP,))
    assert re.match(r"--tap: .* 1 CUDA graphs without taps", anyio.run(_untapped, engine))
    # One without taps is eager: there is nothing to ask.
    engine.model = SimpleNamespace(taps=())
    assert anyio.run(_untapped, engine) == ""


def test_workers_that_do_not_say_whether_they_have_taps_are_not_waited_for() -> None:
    async def call(method: str, args: tuple[Any, ...]) -> None:
        await anyio.sleep_forever()

    engine = object.__new__(VllmEngine)
    engine._patience_s, engine._adapter = 0.01, 0
    engine.llm = SimpleNamespace(collective_rpc=call)
    engine.model = SimpleNamespace(taps=(TAP,))
    with pytest.raises(EngineLost, match="did not answer tracewire_untapped"):
        anyio.run(engine.untapped_graphs)


PATIENCE = 60


async def test_no_call_of_vllm_is_waited_for_without_a_limit() -> None:
    """vLLM fails no call that is under way when its EngineCore dies."""
    from tracewire_engine.adapter.vllm_engine import VllmEngine

    class Silent:
        """An `AsyncLLM` whose EngineCore is gone."""

        def __init__(self) -> None:
            self.engine_core = self
            self.output_processor = self
            self.external_req_ids = {"r": ["r-1"]}

        async def collective_rpc(self, method: str, args: Any) -> None:
            await anyio.sleep_forever()

        async def call_utility_async(self, method: str, *args: Any) -> None:
            await anyio.sleep_forever()

    engine = VllmEngine.__new__(VllmEngine)
    engine.llm, engine._patience_s, engine._adapter = Silent(), 0.01, 0
    calls = [
        engine.pause("r"),
        engine.resume("r"),
        engine.pause_all(),
        engine.resume_all(),
        engine.give_result(b""),
        engine.steer({}, [], 0.0),
        engine._call_workers("tracewire_drop_input", "x"),
    ]
    with anyio.fail_after(PATIENCE):
        for call in calls:
            with pytest.raises(EngineLost, match="did not answer"):
                await call


@pytest.mark.parametrize(
    ("arguments", "drafts"),
    [
        ((), Drafts(3)),
        ((FORCED_ARG,), Drafts(3)),
        ((DECLARED_ARG,), Drafts(3)),
        ((BLOCK_ARG,), Drafts(0, "a block runs once for each token")),
        ((DECLARED_ARG, BLOCK_ARG), Drafts(0, "a block runs once for each token")),
    ],
)
def test_a_request_is_told_whether_it_is_drafted(arguments: tuple[str, ...], drafts: Drafts) -> None:
    """The scheduler is told of one with declared interventions alone."""
    config = SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(async_scheduling=False))
    given = dict.fromkeys(arguments, msgspec.msgpack.encode([]))
    assert _drafts(config, given) is None
    config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    assert given.keys() == set(arguments)
    assert _drafts(config, given) == drafts
    assert (DRAFTS_ARG in given) == (arguments == (DECLARED_ARG,))


async def test_what_the_runner_does_not_take_is_refused_by_its_field() -> None:
    engine = object.__new__(VllmEngine)

    async def prompt(*_: Any) -> tuple[Any, list[int], None]:
        return {}, [1], None

    engine._prompt = prompt  # type: ignore[method-assign]
    engine._bounds = RunnerBounds(SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=False)))
    odd = Invoke(prompt="a", sampling={"seed": 2**63})
    for invokes, field in (([odd], "sampling.seed"), ([Invoke(prompt="b"), odd], "invokes[1].sampling.seed")):
        submission = Submission(trace="t", model="m", invokes=invokes)
        with pytest.raises(Rejection, match="expected an integer from") as caught:
            await engine.prepare(submission, len(invokes) - 1, None, None, "run")
        assert caught.value.failure.field == field
