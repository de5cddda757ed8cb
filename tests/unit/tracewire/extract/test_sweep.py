"""`client.strength_sweep` on a scripted engine that writes what its steering says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tracewire import Client, Probe, TraceRejected
from tracewire.extract.directions import Direction, LayerScore
from tracewire.extract.extraction import Extraction
from tracewire.extract.sweep import Strength, StrengthSweep
from tracewire_bus.wire.messages import Failure

Engine = Callable[..., Any]

VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)
LOSS = 0.5


class Writes:
    """A script that writes as many `a` as its strength says, and knows how likely each was."""

    def __init__(self) -> None:
        self.seeds: list[Any] = []
        self.again: list[list[int]] = []
        self.loras: list[str | None] = []

    async def __call__(self, stage: Stage) -> None:
        invoke = stage.submission.invokes[0]
        if invoke.sampling.get("prompt_logprobs") is not None:
            ids = invoke.token_ids or []
            self.again.append(ids)
            self.loras.append(invoke.lora)
            assert not stage.submission.interventions
            await stage.accept(prompt_token_ids=[ids])
            await stage.output("!")
            steps = [{}, *({token: (-LOSS, 1, "a")} for token in ids[1:])]
            await stage.final(prompt_logprobs=[steps])
            return
        self.seeds.append(invoke.sampling["seed"])
        await stage.accept(prompt_token_ids=[[7, 8]])
        strength = stage.submission.interventions[0].scale
        for _ in range(int(strength)):
            await stage.save("a", {"p": float(strength)})
        await stage.final()


async def test_each_strength_has_its_score_and_its_perplexity(client: Client, engine: Engine) -> None:
    script = Writes()
    async with engine(script):
        await client.models.get("tiny", timeout=30)
        options: Any = {"at": "residual(1)", "seed": 10}
        sweep = await client.strength_sweep("tiny", VECTOR, ["x", "y"], [3, 1], score=len, **options)
    assert [(row.strength, row.score, row.scores) for row in sweep.rows] == [(3, 3, [3, 3]), (1, 1, [1, 1])]
    assert [row.texts for row in sweep.rows] == [["aaa", "aaa"], ["a", "a"]]
    assert all(row.perplexity == pytest.approx(math.exp(LOSS)) for row in sweep.rows)
    # Each prompt has one seed, whatever the strength.
    assert sorted(script.seeds) == [10, 10, 11, 11]
    assert sorted(map(len, script.again)) == [3, 3, 5, 5]
    assert sweep.best().strength == 3
    assert "perplexity" in sweep._repr_svg_()


async def test_the_perplexity_is_that_of_the_same_adapter(client: Client, engine: Engine) -> None:
    script = Writes()
    async with engine(script, loras=["poet"]):
        await client.models.get("tiny", timeout=30)
        await client.strength_sweep("tiny", VECTOR, ["x"], [2], score=len, at="residual(1)", lora="poet")
    assert script.loras == ["poet"]


async def test_a_text_that_fills_the_context_is_read_without_its_end(client: Client, engine: Engine) -> None:
    script = Writes()
    async with engine(script, max_model_len=5):
        await client.models.get("tiny", timeout=30)
        sweep = await client.strength_sweep("tiny", VECTOR, ["x"], [3], score=len, at="residual(1)", max_tokens=3)
    # Two tokens of the prompt and three sampled ones; a prompt has to leave room for one.
    assert [len(ids) for ids in script.again] == [4]
    assert sweep.rows[0].perplexity == pytest.approx(math.exp(LOSS))


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "x", "multi_modal_data": {"image": np.zeros((2, 2, 3), np.uint8)}},
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    ],
)
async def test_the_perplexity_of_a_prompt_with_media_is_refused(client: Client, engine: Engine, prompt: Any) -> None:
    async with engine(Writes()):
        await client.models.get("tiny", timeout=30)
        with pytest.raises(TraceRejected) as refused:
            await client.strength_sweep("tiny", VECTOR, [prompt], [1], score=len, at="residual(1)")
    assert refused.value.field == "perplexity"


async def test_a_probe_or_an_async_function_scores(client: Client, engine: Engine) -> None:
    async def score(text: str) -> float:
        return -len(text)

    one = Direction(VECTOR, 0.0, 1.0, VECTOR, 0.0)
    found = Extraction("tiny", "m", "residual(2)", 2, one, [LayerScore(2, "residual(2)", 1, 1, 1, 1)], {}, {})
    script = Writes()
    async with engine(script):
        await client.models.get("tiny", timeout=30)
        by_probe = await client.strength_sweep(
            "tiny", found, ["x"], [2, 4], score=Probe("p", "residual(3)", reduce="norm"), perplexity=False
        )
        by_function = await client.strength_sweep("tiny", found, ["x"], [2], score=score, perplexity=False)
    assert [row.score for row in by_probe.rows] == [2, 4]
    assert math.isnan(by_probe.rows[0].perplexity)
    assert "perplexity" not in by_probe.plot()
    assert by_function.rows[0].score == -2
    assert script.again == []


async def test_a_vector_of_the_library_is_named(client: Client, engine: Engine) -> None:
    await client.library.put("calm", VECTOR, at="residual(1)")
    async with engine(Writes()):
        await client.models.get("tiny", timeout=30)
        sweep = await client.strength_sweep("tiny", "calm", ["x"], [2], score=len, at="residual(1)", perplexity=False)
    assert sweep.rows[0].score == 2


def test_the_best_is_that_of_a_bearable_perplexity() -> None:
    rows = [Strength(1.0, 0.5, [0.5], 2.0, ["a"]), Strength(2.0, 0.9, [0.9], 50.0, ["b"])]
    assert StrengthSweep(rows).best(10).strength == 1
    with pytest.raises(ValueError, match="at most 1"):
        StrengthSweep(rows).best(1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"strengths": []}, "strengths"),
        ({"prompts": []}, "prompts"),
        ({"score": "good"}, "score"),
        ({"at": None}, "at"),
        ({"vector": "nope"}, "interventions[0].vector"),
    ],
)
async def test_what_cannot_be_swept(client: Client, engine: Engine, changes: dict[str, Any], field: str) -> None:
    given: dict[str, Any] = {"vector": VECTOR, "prompts": ["x"], "strengths": [1], "score": len, "at": "residual(1)"}
    given |= changes
    positional = [given.pop(name) for name in ("vector", "prompts", "strengths")]
    async with engine(Writes()):
        await client.models.get("tiny", timeout=30)
        with pytest.raises(TraceRejected) as refused:
            await client.strength_sweep("tiny", *positional, **given)
    assert refused.value.field == field


async def test_an_unknown_option_is_named(client: Client) -> None:
    with pytest.raises(tracewire.UnknownOption, match="perplexity"):
        await client.strength_sweep("tiny", VECTOR, ["x"], [1], score=len, perplexities=True)  # type: ignore[call-arg]


async def test_an_error_ends_the_other_traces_and_is_raised_as_it_is(client: Client, engine: Engine) -> None:
    last: list[str] = []
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        await stage.accept()
        if stage.submission.invokes[0].prompt == "bad":
            await going.wait()
            await stage.final("failed", Failure(type="Boom", message="it broke"))
            return
        last.append(stage.trace)
        going.set()
        await anyio.sleep_forever()

    with anyio.fail_after(60):
        async with engine(script):
            await client.models.get("tiny", timeout=30)
            with pytest.raises(tracewire.TraceFailed, match="it broke"):
                await client.strength_sweep("tiny", VECTOR, ["x", "bad"], [1], score=len, at="residual(1)")
            await until_cancelled(client, last)


async def test_a_cancelled_sweep_ends_its_traces(client: Client, engine: Engine) -> None:
    running: list[str] = []
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        ids = stage.submission.invokes[0].token_ids
        await stage.accept(prompt_token_ids=[ids or [7, 8]])
        if ids is None and stage.submission.invokes[0].prompt == "x":
            await stage.output("a")
            await stage.final()
            return
        # The trace that steers, of one prompt, and the trace that measures the other's perplexity.
        running.append(stage.trace)
        if len(running) == 2:
            going.set()
        await anyio.sleep_forever()

    with anyio.fail_after(60):
        async with engine(script):
            await client.models.get("tiny", timeout=30)
            async with anyio.create_task_group() as group:

                async def sweep() -> None:
                    await client.strength_sweep("tiny", VECTOR, ["x", "y"], [1], score=len, at="residual(1)")

                group.start_soon(sweep)
                await going.wait()
                group.cancel_scope.cancel()
            await until_cancelled(client, running)


async def until_cancelled(client: Client, traces: list[str]) -> None:
    """Wait until traces have ended, by a cancellation."""
    assert traces
    for trace in traces:
        async with client.subscribe(trace) as events:
            (end,) = [event async for event in events if isinstance(event, tracewire.Final)]
        assert end.status == "cancelled"
