"""Declared interventions on the real engine: each equal to the same thing written as a block."""

# mypy: ignore-errors

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch

import tracewire
from tests.e2e.tracing.test_traces import GREEDY, PROMPT, assert_every_token_once, events_of
from tests.support.engine_process import EngineProcess
from tracewire import Ablate, Clamp, Client, Live, LogitLens, Model, Output, Probe, Steer, StopWhen

HIDDEN = 256
RNG = np.random.default_rng(7)
V = RNG.standard_normal(HIDDEN).astype(np.float32)
W = RNG.standard_normal((3, HIDDEN)).astype(np.float32)
B = RNG.standard_normal(3).astype(np.float32)


async def run(client: Client, model: Model, block: Any = None, prompt: Any = PROMPT, **options: Any) -> Any:
    async with client.trace(model, prompt, block, **{**GREEDY, "max_tokens": 8, **options}) as trace:
        return await trace.result()


def close(ours: list[Any], theirs: list[Any], tolerance: float = 2e-3) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = np.asarray(mine, np.float32), np.asarray(other, np.float32)
        assert mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(other).max())))


@tracewire.intervention
def reads(model, tracer, live, v, w, b):
    raw = [].save()
    projected = [].save()
    linear = [].save()
    norm = [].save()
    mlp = [].save()
    entering = [].save()
    layers = [].save()
    for _ in tracer.iter[:]:
        entering.append(model.model.layers[1].mlp.input[-1].clone())
        mlp.append(model.model.layers[1].mlp.output[-1].clone())
        stream = model.residual(2).output[-1]
        raw.append(stream.clone())
        projected.append(float(stream.float() @ v))
        linear.append((stream.float() @ w.T + b).sigmoid())
        norm.append(float(stream.float().norm()))
        layers.append(torch.stack([model.residual(i).output[-1].float() @ v for i in (3, 4, 5)]))


async def test_large_arrays_by_reference_are_the_same_as_by_value(
    client: Client, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored once for all traces."""
    wide = RNG.standard_normal((64, HIDDEN)).astype(np.float32)
    declared = [
        Ablate("residual(1)", RNG.standard_normal((6, HIDDEN)).astype(np.float32), keep=0.25),
        Probe("p", "residual(2)", weight=wide, bias=wide[:, 0]),
        Probe("q", "residual(3)", weight=wide),
        StopWhen("q", below=-1e9, output=63),
    ]
    bus = client._session.open_bus()

    async def stored() -> set[bytes]:
        return set(await bus.command("KEYS", bus.keys.vector("*")))

    before = await stored()
    with monkeypatch.context() as patch:
        patch.setattr("tracewire.traces.vectors.VECTOR_BYTES", 2**30)
        by_value = await run(client, model, interventions=declared)
    assert await stored() == before
    for _ in range(2):
        by_reference = await run(client, model, interventions=declared)
        assert len(await stored() - before) == 2
        assert by_reference.token_ids == by_value.token_ids
        assert set(by_reference.saves) == {"p", "q"}
        for name, items in by_value.saves.items():
            close(by_reference.saves[name], items, 1e-5)


async def test_reads_are_what_a_block_reads(client: Client, model: Model) -> None:
    block = await run(client, model, reads(v=V, w=W, b=B))
    result = await run(
        client,
        model,
        interventions=[
            Probe("entering", "model.layers.1.mlp.input"),
            Probe("mlp", "model.layers.1.mlp"),
            Probe("raw", "residual(2)"),
            Probe("projected", "residual(2)", weight=V),
            Probe("linear", "residual(2)", weight=W, bias=B, activation="sigmoid"),
            Probe("norm", "residual(2)", reduce="norm"),
            Probe("layers", "residual(3:6)", weight=V),
        ],
    )
    assert result.token_ids == block.token_ids
    assert set(result.saves) == set(block.saves)
    for name in ("raw", "mlp", "entering"):
        assert [value.dtype.name for value in result.saves[name]] == ["bfloat16"] * 8
        assert all(a.tobytes() == b.tobytes() for a, b in zip(result.saves[name], block.saves[name], strict=True))
    assert all(type(value) is float for value in result.saves["projected"])
    for name in ("projected", "linear", "norm", "layers"):
        close(result.saves[name], block.saves[name])


async def test_positions(client: Client, model: Model) -> None:
    @tracewire.intervention
    def block(model, tracer, live, v):
        everywhere = [].save()
        mean = [].save()
        for _ in tracer.iter[:]:
            stream = model.residual(2).output
            everywhere.append(stream.clone())
            mean.append((stream.float() @ v).mean(0).item())

    expected = await run(client, model, block(v=V))
    result = await run(
        client,
        model,
        interventions=[
            Probe("everywhere", "residual(2)", positions="all"),
            Probe("mean", "residual(2)", weight=V, reduce="mean", positions="all"),
            Probe("prompt", "residual(2)", positions="prompt"),
            Probe("generated", "residual(2)", positions="generated"),
            Probe("several", "residual(0:2)", weight=W, positions="prompt"),
        ],
    )
    prompt = result.usage.prompt_tokens
    everywhere = expected.saves["everywhere"]
    assert [value.shape for value in result.saves["everywhere"]] == [(prompt, HIDDEN)] + [(1, HIDDEN)] * 7
    close(result.saves["everywhere"], everywhere, 0)
    close(result.saves["mean"], expected.saves["mean"])
    close(result.saves["prompt"], everywhere[:1], 0)
    close(result.saves["generated"], everywhere[1:], 0)
    assert [value.shape for value in result.saves["several"]] == [(prompt, 2, 3)]


@tracewire.intervention
def steered(model, tracer, live, v, scale):
    after = [].save()
    for _ in tracer.iter[:]:
        model.model.layers[2].output[0][:] += scale * v
        after.append(model.residual(2).output[-1].clone())


@tracewire.intervention
def clamped(model, tracer, live, v):
    after = [].save()
    unit = v / v.norm()
    for _ in tracer.iter[:]:
        stream = model.residual(2).output.float()
        along = stream @ unit
        model.model.layers[2].output[0][:] += (along.clamp(-0.25, 0.25) - along)[:, None] * unit
        after.append(model.residual(2).output[-1].clone())


@tracewire.intervention
def projected_out(model, tracer, live, w):
    after = [].save()
    basis = torch.linalg.qr(w.T)[0].T
    for _ in tracer.iter[:]:
        stream = model.residual(2).output.float()
        model.model.layers[2].output[0][:] -= (stream @ basis.T) @ basis
        after.append(model.residual(2).output[-1].clone())


@tracewire.intervention
def turned_off(model, tracer, live):
    after = [].save()
    for _ in tracer.iter[:]:
        model.model.layers[2].mlp.output[:] *= 0.5
        after.append(model.residual(2).output[-1].clone())


@pytest.mark.parametrize(
    ("block", "edit", "tolerance"),
    [
        (steered(v=V, scale=0.75), Steer("residual(2)", V, scale=0.75), 0),
        (clamped(v=V), Clamp("residual(2)", 3 * V, min=-0.25, max=0.25), 2e-2),
        (projected_out(w=W), Ablate("residual(2)", W), 2e-2),
        (turned_off, Ablate("model.layers.2.mlp", keep=0.5), 0),
    ],
)
async def test_edits_do_what_a_block_does(
    client: Client, model: Model, block: Any, edit: Any, tolerance: float
) -> None:
    plain = await run(client, model)
    expected = await run(client, model, block)
    result = await run(client, model, interventions=[edit, Probe("after", "residual(2)")])
    assert result.token_ids == expected.token_ids
    close(result.saves["after"], expected.saves["after"], tolerance)
    other = await run(client, model, interventions=[Probe("after", "residual(2)"), edit])
    assert other.token_ids == expected.token_ids
    # Read before the edit, in the first step: what it would have been.
    unedited = await run(client, model, interventions=[Probe("after", "residual(2)")])
    before = edit.at == "residual(2)"
    assert (other.saves["after"][0].tobytes() == unedited.saves["after"][0].tobytes()) is before
    assert unedited.token_ids == plain.token_ids


async def test_the_outputs_of_a_trace_that_only_edits_say_when_their_step_ended(client: Client, model: Model) -> None:
    begun = time.time()
    async with client.trace(model, PROMPT, interventions=[Steer("residual(2)", V)], **GREEDY) as trace:
        times = [item.time async for item in trace if isinstance(item, Output)]
    assert times == sorted(times)
    assert begun < times[0]
    assert times[-1] < time.time()


async def test_an_edit_at_generated_positions_leaves_the_prompt(client: Client, model: Model) -> None:
    result = await run(
        client,
        model,
        interventions=[
            Steer("residual(1)", 50 * V, positions="generated"),
            Probe("seen", "residual(1)", positions="all"),
        ],
    )
    plain = await run(client, model, interventions=[Probe("seen", "residual(1)", positions="all")])
    assert result.saves["seen"][0].tobytes() == plain.saves["seen"][0].tobytes()
    assert result.token_ids[0] == plain.token_ids[0]
    assert np.abs(result.saves["seen"][1].astype(np.float32)).max() > 20


async def test_live_parameters_stand_for_numbers_and_vectors(client: Client, model: Model) -> None:
    fixed = await run(client, model, interventions=[Steer("residual(2)", V, scale=0.5), Probe("x", "residual(2)")])
    live = await run(
        client,
        model,
        interventions=[Steer("residual(2)", Live("v"), scale=Live("alpha")), Probe("x", "residual(2)")],
        live={"v": V, "alpha": 0.5},
    )
    assert live.digest() == fixed.digest()


@tracewire.intervention
def lens_block(model, tracer, live):
    lens = [].save()
    for _ in tracer.iter[:]:
        stream = model.residual(4).output[-1:]
        logits = model.logits_processor(model.lm_head, model.model.norm(stream))
        lens.append(logits[0].float().topk(5).indices.int())


async def test_the_logit_lens(client: Client, model: Model) -> None:
    expected = await run(client, model, lens_block)
    result = await run(
        client, model, interventions=[LogitLens("lens", "residual(4)"), LogitLens("last", "residual(-2:99)", top_k=3)]
    )
    close([item["token_ids"] for item in result.saves["lens"]], expected.saves["lens"], 0)
    last = result.saves["last"]
    assert {item["token_ids"].shape for item in last} == {(2, 3)}
    assert {item["logits"].dtype.name for item in last} == {"float32"}
    # The last layer's lens is the model's own head: its best is what greedy sampling took.
    assert [int(item["token_ids"][1, 0]) for item in last] == result.token_ids


async def test_stop_when(client: Client, model: Model) -> None:
    whole = await run(client, model, interventions=[Probe("p", "residual(3)", weight=V)], max_tokens=12)
    values = whole.saves["p"]
    at = 5
    threshold = values[at]
    first = next(index for index, value in enumerate(values) if value >= threshold)
    async with client.trace(
        model,
        PROMPT,
        interventions=[
            Probe("p", "residual(3)", weight=V),
            StopWhen("p", above=Live("limit")),
        ],
        live={"limit": threshold - 1e-4},
        **{**GREEDY, "max_tokens": 500},
    ) as trace:
        result = await trace.result()
        events = await events_of(client, trace.id)
    assert result.status == "stopped"
    assert result.finish_reason == "stop"
    assert result.token_ids == whole.token_ids[: first + 1]
    assert result.saves["p"] == pytest.approx(values[: first + 1], rel=1e-3)
    assert_every_token_once(events, first + 1)


async def test_beside_a_block_which_is_served_after_them(client: Client, model: Model) -> None:
    @tracewire.intervention
    def block(model, tracer, live):
        seen = [].save()
        p = [].save()
        for _ in tracer.iter[:]:
            seen.append(model.residual(2).output[-1].clone())
            p.append(1)

    result = await run(
        client,
        model,
        block,
        interventions=[Steer("residual(2)", 9 * V), Probe("p", "residual(2)"), LogitLens("q", "residual(5)")],
    )
    assert all(a.tobytes() == b.tobytes() for a, b in zip(result.saves["seen"], result.saves["p"], strict=True))
    assert len(result.saves["q"]) == 8
    assert list(result.save_errors) == ["0.0.p"]


async def test_many_at_once_each_with_its_own(client: Client, model: Model) -> None:
    """Different vectors, scales, lists, lengths and prompts in one batch: each as it is alone."""
    results: dict[int, Any] = {}

    def one(index: int) -> dict[str, Any]:
        own = np.random.default_rng(index).standard_normal(HIDDEN).astype(np.float32)
        declared: list[Any] = [Probe("score", "residual(3)", weight=own), Steer("residual(1)", own, scale=index / 20)]
        if index % 3 == 0:
            declared.reverse()
        if index % 4 == 0:
            declared.append(Ablate("residual(4)", own))
        if index % 5 == 0:
            declared = [Probe("score", "residual(3)", weight=own, positions="all", reduce="mean")]
        return {
            "prompt": f"def f{index}(x):\n" + "    x = x + 1\n" * (index % 4),
            "interventions": declared,
            "max_tokens": 4 + index % 7,
        }

    async def together(index: int) -> None:
        options = one(index)
        results[index] = await run(client, model, **options)

    async with anyio.create_task_group() as group:
        for index in range(24):
            group.start_soon(together, index)
    for index in range(0, 24, 3):
        alone = await run(client, model, **one(index))
        result = results[index]
        assert len(result.saves["score"]) == len(result.token_ids) == 4 + index % 7
        # In bfloat16 another batch may round otherwise and then sample otherwise; the first step is before that.
        assert result.saves["score"][0] == pytest.approx(alone.saves["score"][0], rel=0.05, abs=0.5)


async def test_large_steps_pass_through_shared_memory(client: Client, model: Model, engine: EngineProcess) -> None:
    @tracewire.intervention
    def block(model, tracer, live):
        whole = model.residual(3).output.clone().save()

    declared = [Probe("whole", "residual(3)", positions="prompt")]
    for first in range(5):
        prompt = [1 + (first + index) % 200 for index in range(60)]
        expected = await run(client, model, block, prompt, max_tokens=2)
        result = await run(client, model, prompt=prompt, interventions=declared, max_tokens=2)
        (whole,) = result.saves["whole"]
        assert whole.tobytes() == expected.saves["whole"].tobytes()
    # The adapter and its worker.
    assert len(sharing(engine)) == 2


def sharing(engine: EngineProcess) -> list[psutil.Process]:
    """Those of an engine's processes that have the ring buffer open."""
    processes = [psutil.Process(engine.process.pid), *engine.descendants()]
    return [one for one in processes if "tracewire-ring" in Path(f"/proc/{one.pid}/maps").read_text()]


async def test_a_large_read_is_a_reference(client: Client, model: Model) -> None:
    prompt = [1 + index % 200 for index in range(400)]
    inline = await run(client, model, prompt=prompt, interventions=[Probe("last", "residual(3)")], max_tokens=2)
    result = await run(
        client, model, prompt=prompt, interventions=[Probe("whole", "residual(3)", positions="all")], max_tokens=2
    )
    whole, one = result.saves["whole"]
    assert isinstance(whole, tracewire.ArrayRef)
    assert whole.shape == (400, HIDDEN)
    loaded = await whole.load()
    assert loaded[-1].tobytes() == inline.saves["last"][0].tobytes()
    assert one.shape == (1, HIDDEN)


async def test_choices_have_saves_of_their_own(client: Client, model: Model) -> None:
    result = await run(
        client, model, interventions=[Probe("p", "residual(5)")], n=3, temperature=1.0, seed=3, max_tokens=5
    )
    choices = result.invokes[0].choices
    assert [len(choice.saves["p"]) for choice in choices] == [5, 5, 5]
    assert len({choice.saves["p"][4].tobytes() for choice in choices}) > 1


async def test_what_does_not_fit_ends_its_own_trace(client: Client, model: Model) -> None:
    others: list[Any] = []

    async def bystander() -> None:
        others.append(await run(client, model, interventions=[Probe("p", "residual(0)")], max_tokens=30))

    async with anyio.create_task_group() as group:
        group.start_soon(bystander)
        for edit in (
            Steer("model.layers.1.self_attn.qkv_proj", V[:7]),
            Probe("bad", "model.layers.1.mlp.gate_up_proj", weight=V[:7]),
            Ablate("model.layers", V),
        ):
            with pytest.raises(tracewire.TraceFailed, match=r"fit|does not reach") as raised:
                await run(client, model, interventions=[Probe("p", "residual(0)"), edit])
            assert raised.value.result.status == "failed"
    assert len(others[0].saves["p"]) == 30


async def test_bad_input_is_refused_before_it_is_sent(client: Client, model: Model) -> None:
    for declared, field in (
        (Probe("p", "residual(99)"), "interventions[0].at"),
        (Steer("residual(0)", V[:3]), "interventions[0].vector"),
        (Steer("residual(0)", V, scale=Live("nope")), "interventions[0].scale"),
    ):
        with pytest.raises(tracewire.TraceRejected) as raised:
            await run(client, model, interventions=[declared])
        assert raised.value.field == field


async def test_tokens_have_strings_made_by_the_engine(client: Client, model: Model) -> None:
    lens = LogitLens("lens", "residual(*)", top_k=3)
    async with client.trace(
        model, PROMPT, interventions=[lens], token_strings=True, **{**GREEDY, "max_tokens": 6}
    ) as trace:
        accepted = await trace.accepted()
        outputs = [output async for output in trace.outputs()]
        result = await trace.result()
    tokenizer = model.tokenizer
    (prompt,) = accepted.prompt_token_ids
    assert prompt == tokenizer.encode(PROMPT)
    assert accepted.prompt_token_strings == [[tokenizer.decode([one]) for one in prompt]]
    strings = [tokenizer.decode([one]) for one in result.token_ids]
    assert result.token_strings == strings
    assert [string for output in outputs for string in output.token_strings] == strings
    assert "".join(strings) == result.text
    for item, token_id in zip(result.saves["lens"], result.token_ids, strict=True):
        shown = [[tokenizer.decode([one]) for one in row] for row in item["token_ids"].tolist()]
        assert item["token_strings"] == shown
        assert item["token_ids"][-1][0] == token_id
    plain = await run(client, model, interventions=[lens], max_tokens=2)
    assert plain.token_strings is None
    assert plain.saves["lens"][0].keys() == {"token_ids", "logits"}
    assert plain.accepted.prompt_token_ids == [prompt]
    assert plain.accepted.prompt_token_strings == []
