"""The provider behind Inspect's own model, and in a whole evaluation, on a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import inspect_ai
import numpy as np
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, Model, get_model
from inspect_ai.scorer import Score, Target, mean, scorer
from inspect_ai.solver import TaskState, generate
from inspect_ai.tool import Tool, ToolFunction, tool

import tracewire
from tests.support.bus_engine import Stage
from tests.support.until import until
from tracewire import BusUnavailable, EngineLost, Overloaded, Probe, Steer, TraceRejected, UnknownModel
from tracewire_bus.wire.messages import Failure, MessageDelta, ToolCallDelta
from tracewire_bus.wire.packing import unpack

VECTOR = np.arange(8, dtype=np.float32)
DECLARED = [Steer("residual(2)", VECTOR, scale=tracewire.Live("alpha")), Probe("p", "residual(3)", weight=VECTOR)]


async def played(stage: Stage) -> None:
    """An answer that tells what was asked, with a value for each token."""
    await stage.accept()
    chat = stage.submission.invokes[0].chat
    assert chat is not None
    for number, word in enumerate(str(chat.messages[-1]["content"]).split()):
        await stage.save(word, {"p": 0.5 + number, "rows": np.full(64, number, np.float32)})
    await stage.output("", finish_reason="stop")
    await stage.final()


@pytest.fixture
async def models(redis_url: str, prefix: str) -> AsyncIterator[Callable[..., Model]]:
    """Makes models of the provider, and closes them."""
    made: list[Model] = []

    def make(model: str = "tiny", **arguments: Any) -> Model:
        given = {"url": redis_url, "prefix": prefix, **arguments}
        made.append(get_model(f"tracewire/{model}", memoize=False, **given))
        return made[-1]

    yield make
    for one in made:
        await one.api.aclose()


async def test_what_the_engine_is_sent(engine: Callable[..., Any], models: Callable[..., Model]) -> None:
    model = models(interventions=DECLARED, live={"alpha": 2.0}, priority=4, name="evaluation")
    config = GenerateConfig(max_tokens=9, seed=3, extra_body={"live": {"alpha": 3.0}, "ignore_eos": True})
    async with engine(played) as serving:
        messages = [ChatMessageSystem(content="Be brief."), ChatMessageUser(content="a b")]
        output = await model.generate(messages, config=config)
        (taken,) = serving.taken
    assert output.completion == "ab"
    assert [one.at for one in taken.interventions] == ["residual(2)", "residual(3)"]
    assert (taken.priority, taken.client) == (4, "evaluation")
    invoke = taken.invokes[0]
    assert invoke.sampling == {"max_tokens": 9, "seed": 3, "ignore_eos": True}
    assert [one["content"] for one in invoke.chat.messages] == ["Be brief.", "a b"]
    assert output.metadata["saves"] == {"p": [0.5, 1.5], "rows": {"dtype": "float32", "shape": [2, 64]}}
    assert output.metadata["trace_id"] == taken.trace
    # The generation's first value stands before the model's.
    assert unpack(taken.live) == {"alpha": 3.0}


async def test_tools_go_there_and_calls_come_back(engine: Callable[..., Any], models: Callable[..., Model]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        call = ToolCallDelta(index=0, id="c0", name="add", arguments='{"x": 1, "y": 2}')
        await stage.output("x", message=MessageDelta(tool_calls=[call]), finish_reason="stop")
        await stage.final()

    async with engine(script) as serving:
        output = await models().generate("1 + 2?", tools=[add()], tool_choice=ToolFunction("add"))
        chat = serving.taken[0].invokes[0].chat
    assert (output.stop_reason, output.message.tool_calls[0].arguments) == ("tool_calls", {"x": 1, "y": 2})
    assert [one["function"]["name"] for one in chat.tools] == ["add"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "add"}}


@tool
def add() -> Tool:
    """A tool."""

    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: One.
            y: The other.
        """
        return x + y

    return execute


async def test_a_refusal_names_the_model_argument(engine: Callable[..., Any], models: Callable[..., Model]) -> None:
    async with engine(played):
        with pytest.raises(TraceRejected, match=r"model argument probe: residual\(9\): the model has 4 layers"):
            await models(probe="residual(9)").generate("x")
        with pytest.raises(UnknownModel):
            await models("other").generate("x")
        with pytest.raises(TraceRejected, match=r"extra_body\.min_pp"):
            await models().generate("x", config=GenerateConfig(extra_body={"min_pp": 1}))


async def test_a_cancelled_generation_cancels_its_trace(
    engine: Callable[..., Any], models: Callable[..., Model]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await anyio.sleep_forever()

    async with engine(script) as serving, anyio.create_task_group() as group:
        group.start_soon(models().generate, "x")
        await until(lambda: serving.stages)
        (stage,) = serving.stages.values()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await until(lambda: stage.cancelled is not None)


async def test_only_what_may_pass_is_tried_again(engine: Callable[..., Any], models: Callable[..., Model]) -> None:
    model = models()
    provider = model.api
    full = provider.should_retry(Overloaded("tiny", 5, 5, 2.5))
    assert (full.retry, full.kind, full.retry_after) == (True, "rate_limit", 2.5)
    lost = provider.should_retry(EngineLost("lost", trace_id="x"))
    assert (lost.retry, lost.kind) == (True, "transient")
    for error in (TraceRejected("prompt", "no"), UnknownModel("tiny", []), ValueError("no"), BusUnavailable("away")):
        assert not provider.should_retry(error)
    async with engine(played):
        await model.generate("x")
    assert provider.should_retry(BusUnavailable("away"))


async def test_a_redis_that_never_answered_ends_the_evaluation(models: Callable[..., Model]) -> None:
    with pytest.raises(BusUnavailable):
        await models(url="redis://localhost:1", retry_timeout=0).generate("x")


async def test_a_lost_engine_s_generation_is_tried_again(
    engine: Callable[..., Any], models: Callable[..., Model]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        if len(serving.taken) == 1:
            await stage.final("failed", Failure("EngineLost", "it died"))
        else:
            await stage.output("at last", finish_reason="stop")
            await stage.final()

    async with engine(script) as serving:
        output = await models().generate("x", config=GenerateConfig(max_retries=2))
    assert (output.completion, len(serving.taken)) == ("at last", 2)


@scorer(metrics=[mean()])
def projection() -> Any:
    """The mean of what the probe read, and of the rows that the metadata only describes."""

    async def score(state: TaskState, target: Target) -> Score:
        read = state.output.metadata["saves"]["p"]
        rows = (await tracewire.inspect.saves(state.output)).to_numpy("rows")
        return Score(value=float(np.mean(read)), metadata={"rows": float(rows[-1].sum())})

    return score


def evaluated(task: Task, **options: Any) -> EvalLog:
    """The log of an evaluation with its samples, which Inspect reads when they are first asked for."""
    (log,) = inspect_ai.eval(task, **options)
    assert log.samples
    return log


@pytest.mark.parametrize("times", [2])
async def test_a_whole_evaluation(
    times: int, engine: Callable[..., Any], redis_url: str, prefix: str, tmp_path: Path
) -> None:
    task = Task([Sample(input="a b c", id=1), Sample(input="d", id=2)], solver=generate(), scorer=projection())
    run = partial(
        evaluated,
        task,
        model="tracewire/tiny",
        model_args={"url": redis_url, "prefix": prefix, "probe": "p=residual(1)"},
        log_dir=str(tmp_path),
        display="none",
        max_tokens=8,
    )
    async with engine(played) as serving:
        # Each in an event loop of its own, with the provider that Inspect keeps.
        logs = [await anyio.to_thread.run_sync(run) for _ in range(times)]
    assert len(serving.taken) == 2 * times
    for log in logs:
        assert (log.status, log.error) == ("success", None)
        assert log.results.scores[0].metrics["mean"].value == pytest.approx((1.5 + 0.5) / 2)
        assert log.eval.model_args["probe"] == "p=residual(1)"
        first, second = sorted(log.samples, key=lambda one: one.id)
        assert first.output.completion == "abc"
        assert first.output.metadata["saves"]["p"] == [0.5, 1.5, 2.5]
        assert second.scores["projection"].metadata == {"rows": 0.0}
        assert first.scores["projection"].metadata == {"rows": 128.0}
        (usage,) = log.stats.model_usage.values()
        assert usage.input_tokens == 6
        call = next(event for event in first.events if event.event == "model").call
        assert call.request["interventions"][0]["do"] == "probe"
        assert call.response["trace_id"] == first.output.metadata["trace_id"]
        json.dumps(first.output.metadata)


def test_inspect_takes_objects_for_the_same_and_not_json_forms() -> None:
    """The page tells users to pass `memoize=False` with objects, for as long as this holds."""
    make = partial(get_model, "tracewire/tiny", url="redis://localhost:1")
    probes = [Probe("a", "residual(1)"), Probe("b", "residual(1)")]
    first, second = (make(interventions=[probe]) for probe in probes)
    assert first is second
    forms = [{"do": "probe", "name": name, "at": "residual(1)"} for name in "ab"]
    first, second = (make(interventions=[form]) for form in forms)
    assert first is not second
    first, second = (make(interventions=[probe], memoize=False) for probe in probes)
    assert first is not second
