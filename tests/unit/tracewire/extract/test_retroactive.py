"""`client.apply_probe`: a probe over what was harvested or saved before, and over traces that run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.support.bus_engine import Stage
from tests.support.harvests import reads, values_of
from tracewire import Client, Probe, TraceRejected

Engine = Callable[..., Any]

WEIGHT = np.array([0.5, -1.0, 2.0], np.float32)
PROBE = Probe("p", "residual(2)", weight=WEIGHT, bias=0.25)


async def harvested(client: Client, engine: Engine, to: Path) -> str:
    """A harvest of two prompts."""
    async with engine(reads, hidden_size=3):
        await client.models.get("tiny", timeout=30)
        await client.harvest("tiny", ["abc", "de"], [Probe("hs", "residual(*)", positions="all")], to=str(to))
    return str(to)


async def test_over_a_harvest_without_an_engine(client: Client, engine: Engine, tmp_path: Path) -> None:
    to = await harvested(client, engine, tmp_path / "acts")
    found = await client.apply_probe(PROBE, harvest=to)
    assert [(one.key, one.prompt_tokens, one.positions.tolist()) for one in found] == [
        (0, 3, [0, 1, 2]),
        (1, 2, [0, 1]),
    ]
    for one, prompt in zip(found, ("abc", "de"), strict=True):
        assert one.values == pytest.approx(values_of(prompt)[:, 2] @ WEIGHT + 0.25)
        assert one.token_ids[: len(prompt)] == [*map(ord, prompt)]


async def test_a_probe_of_the_library(client: Client, engine: Engine, tmp_path: Path) -> None:
    to = await harvested(client, engine, tmp_path / "acts")
    await client.library.put("seen", {"weight": WEIGHT, "bias": 0.25}, kind="probe", at="residual(2)")
    await client.library.put("two", np.stack([WEIGHT, -WEIGHT]), kind="probe")
    await client.library.put("layers", {2: WEIGHT})
    found = await client.apply_probe(Probe("p", "residual(2)", weight="seen"), harvest=to)
    assert found[0].values == pytest.approx(values_of("abc")[:, 2] @ WEIGHT + 0.25)
    found = await client.apply_probe(Probe("p", "residual(2)", weight="two", activation="softmax"), harvest=to)
    assert found[0].values.shape == (3, 2)
    assert found[0].values.sum(1) == pytest.approx(1)
    for probe, message in (
        (Probe("p", "residual(3)", weight="seen"), "and not to"),
        (Probe("p", "residual(2)", weight="layers"), "no array of one location"),
    ):
        with pytest.raises(TraceRejected, match=message):
            await client.apply_probe(probe, harvest=to)
    with pytest.raises(tracewire.UnknownEntry):
        await client.apply_probe(Probe("p", "residual(2)", weight="nope"), harvest=to)


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


async def saving(stage: Stage) -> None:
    """A script of a trace of four tokens that saves a row each; and of a trace that reads a sequence once more."""
    invoke = stage.submission.invokes[0]
    if invoke.token_ids is None:
        await stage.accept(prompt_token_ids=[[7, 8]])
        for number, row in enumerate(ROWS):
            await stage.save("a", {"stream": row, "all": ROWS[number : number + 1]})
        await stage.final()
        return
    (probe,) = stage.submission.interventions
    assert (probe.positions, invoke.sampling["max_tokens"]) == ("prompt", 1)
    await stage.accept(prompt_token_ids=[invoke.token_ids])
    await stage.save("b", {probe.name: np.asarray(invoke.token_ids, np.float32) * 10})
    await stage.final()


async def test_over_what_finished_traces_saved(client: Client, engine: Engine) -> None:
    async with engine(saving):
        await client.models.get("tiny", timeout=30)
        for name in ("one", "two"):
            await client.trace("tiny", "x", max_tokens=4, trace_id=name).result()
    found = await client.apply_probe(PROBE, traces=["two", "one"], saves="stream")
    assert [one.key for one in found] == ["two", "one"]
    assert found[0].values == pytest.approx(ROWS @ WEIGHT + 0.25)
    # The last token of the prompt, and each sampled one but the last.
    assert found[0].positions.tolist() == [1, 2, 3, 4]
    assert (found[0].token_ids, found[0].prompt_tokens) == ([7, 8, 100, 101, 102, 103], 2)
    # Each position that was read, from the first one on: too few for this prompt and these tokens, so unknown.
    (found,) = await client.apply_probe(PROBE, traces=["one"], saves="all")
    assert found.positions.tolist() == [-1] * 4
    with pytest.raises(tracewire.SaveMissing):
        await client.apply_probe(PROBE, traces=["one"], saves="other")
    with pytest.raises(tracewire.UnknownTrace):
        await client.apply_probe(PROBE, traces=["gone"], saves="stream")


async def test_by_running_traces_again(client: Client, engine: Engine) -> None:
    async with engine(saving, hidden_size=3):
        await client.models.get("tiny", timeout=30)
        await client.trace("tiny", "x", max_tokens=4, trace_id="one").result()
        (found,) = await client.apply_probe(PROBE, traces=["one"])
    assert found.values.tolist() == [70, 80, 1000, 1010, 1020, 1030]
    assert (found.positions.tolist(), found.prompt_tokens) == ([0, 1, 2, 3, 4, 5], 2)


async def test_a_recording_runs_again_with_its_adapter_and_as_far_as_the_context_goes(
    client: Client, engine: Engine
) -> None:
    again: list[Any] = []

    async def script(stage: Stage) -> None:
        if stage.submission.invokes[0].token_ids is not None:
            again.append(stage.submission.invokes[0])
        await saving(stage)

    async with engine(script, hidden_size=3, loras=["poet"], max_model_len=6):
        await client.models.get("tiny", timeout=30)
        async with client.trace("tiny", "x", max_tokens=4, lora="poet") as trace:
            await trace.result()
            recording = await trace.record()
        (found,) = await client.apply_probe(PROBE, traces=[recording])
    assert [one.lora for one in again] == ["poet"]
    # Two tokens of the prompt and four sampled ones; a prompt has to leave room for one.
    assert [len(one.token_ids) for one in again] == [5]
    assert found.positions.tolist() == [0, 1, 2, 3, 4]


async def test_a_cancelled_call_ends_the_traces_that_run_again(client: Client, engine: Engine) -> None:
    running: list[str] = []
    going = anyio.Event()

    async def script(stage: Stage) -> None:
        if stage.submission.invokes[0].token_ids is None:
            await saving(stage)
            return
        running.append(stage.trace)
        await stage.accept()
        going.set()
        await anyio.sleep_forever()

    with anyio.fail_after(60):
        async with engine(script, hidden_size=3):
            await client.models.get("tiny", timeout=30)
            await client.trace("tiny", "x", max_tokens=4, trace_id="one").result()
            async with anyio.create_task_group() as group:

                async def apply() -> None:
                    await client.apply_probe(PROBE, traces=["one"])

                group.start_soon(apply)
                await going.wait()
                group.cancel_scope.cancel()
            async with client.subscribe(running[0]) as events:
                (end,) = [event async for event in events if isinstance(event, tracewire.Final)]
    assert end.status == "cancelled"


async def several(stage: Stage) -> None:
    """A script of a trace of two prompts with two choices each."""
    await stage.accept(prompt_token_ids=[[7], [8, 9]])
    for invoke in range(2):
        for choice in range(2):
            for number in range(2):
                row = ROWS[invoke * 2 + choice] + number
                await stage.save("a", {"stream": row, "words": "no numbers"}, invoke=invoke, choice=choice)
    await stage.final()


async def test_each_choice_of_each_prompt_is_a_reading(client: Client, engine: Engine, tmp_path: Path) -> None:
    async with engine(several):
        await client.models.get("tiny", timeout=30)
        trace = client.trace("tiny", prompts=["x", "yz"], max_tokens=2, n=2, trace_id="one")
        await trace.result()
        (await trace.record()).save(tmp_path / "one.twrec")
    recording = tracewire.Recording.open(tmp_path / "one.twrec")
    for traces in (["one"], [recording]):
        found = await client.apply_probe(PROBE, traces=traces, saves="stream")
        assert [(one.key, one.invoke, one.choice) for one in found] == [
            ("one", invoke, choice) for invoke in range(2) for choice in range(2)
        ]
        for row, one in zip(ROWS, found, strict=True):
            assert one.values == pytest.approx(np.stack([row, row + 1]) @ WEIGHT + 0.25)
        assert [one.positions.tolist() for one in found] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    with pytest.raises(TraceRejected, match="expected a list of activations") as refused:
        await client.apply_probe(PROBE, traces=["one"], saves="words")
    assert refused.value.field == "saves"


@pytest.mark.parametrize(
    ("probe", "source", "field"),
    [
        (Probe("p", "residual(2)"), {"harvest": "x"}, "probe"),
        ("p", {"harvest": "x"}, "probe"),
        (PROBE, {}, "harvest"),
        (PROBE, {"harvest": "x", "traces": ["a"]}, "harvest"),
        (PROBE, {"harvest": "x", "saves": "a"}, "saves"),
        (PROBE, {"traces": "a"}, "traces"),
        (PROBE, {"traces": [3]}, "traces[0]"),
        (Probe("p", "residual(2)", weight=np.zeros((1, 1, 1))), {"harvest": "x"}, "probe.weight"),
    ],
)
async def test_what_cannot_be_applied(client: Client, probe: Any, source: dict[str, Any], field: str) -> None:
    with pytest.raises(TraceRejected) as refused:
        await client.apply_probe(probe, **source)
    assert refused.value.field == field


async def test_activations_that_a_harvest_lacks_are_named(client: Client, engine: Engine, tmp_path: Path) -> None:
    to = await harvested(client, engine, tmp_path / "acts")
    with pytest.raises(TraceRejected, match="it has: residual\\(0\\), residual\\(1\\)"):
        await client.apply_probe(Probe("p", "model.layers.1.mlp", weight=WEIGHT), harvest=to)
    with pytest.raises(TraceRejected, match="a width of 3, the weight of 8"):
        await client.apply_probe(Probe("p", "residual(1)", weight=np.zeros(8)), harvest=to)
