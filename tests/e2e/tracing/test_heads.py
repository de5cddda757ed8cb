"""Attention heads on the real engine: each intervention equal, bit for bit, to the same thing written as a block."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch

import tracewire
from tests.e2e.tracing.test_declared import run
from tests.e2e.tracing.test_patching import equal
from tests.support import ROOT
from tests.support.cells import run_page
from tests.support.steering import held_up
from tracewire import AttentionPattern, Client, HeadAblate, HeadProbe, Live, Model, Patch, Probe, TraceRejected

#: Of the demo model, whose heads share keys and values in pairs.
HEADS, SIZE = 4, 64
AFTER = [Probe("after", "residual(4)", positions="all")]
MEAN = np.linspace(-1, 1, SIZE, dtype=np.float32)


@tracewire.intervention
def reads(model, tracer, live):
    heads = [].save()
    several = [].save()
    norms = [].save()
    for _ in tracer.iter[:]:
        found = [model.model.layers[i].self_attn.o_proj.input[-1].view(4, 64).clone() for i in (2, 3)]
        heads.append(found[0])
        several.append(torch.stack(found))
        norms.append(found[0][[3, 1]].float().norm(dim=-1))


@tracewire.intervention
def scaled(model, tracer, live, heads, keep, mean):
    after = [].save()
    for _ in tracer.iter[:]:
        value = model.model.layers[2].self_attn.o_proj.input
        for head in heads:
            part = value[:, 64 * head : 64 * head + 64]
            part[:] = torch.lerp(mean.expand(part.shape), part.float(), keep)
        after.append(model.residual(4).output.clone())


@tracewire.intervention
def replaced(model, tracer, live, head, place, value):
    after = [].save()
    for step in tracer.iter[:]:
        if step == 0:
            model.model.layers[2].self_attn.o_proj.input[place, 64 * head : 64 * head + 64] = value
        after.append(model.residual(4).output.clone())


async def test_heads_are_what_enters_the_output_projection(client: Client, model: Model) -> None:
    assert {(one.heads, one.kv_heads, one.head_size) for one in model.tree.attention.values()} == {(HEADS, 2, SIZE)}
    expected = await run(client, model, reads)
    result = await run(
        client,
        model,
        interventions=[
            HeadProbe("heads", "heads(2)"),
            HeadProbe("several", "heads(2:4)"),
            HeadProbe("norms", "heads(2)", heads=[3, 1], reduce="norm"),
        ],
    )
    assert result.token_ids == expected.token_ids
    for name in ("heads", "several"):
        assert [one.tobytes() for one in result.saves[name]] == [one.tobytes() for one in expected.saves[name]]
    assert result.saves["several"][0].shape == (2, HEADS, SIZE)
    np.testing.assert_allclose(np.stack(result.saves["norms"]), np.stack(expected.saves["norms"]), rtol=1e-5)


async def test_ablations_are_what_a_block_does(client: Client, model: Model) -> None:
    plain = await run(client, model, interventions=AFTER)
    for heads, keep, mean in (([1], 0.0, None), ([0, 3], 0.0, MEAN), ([2], 0.5, None), ([3, 1], 2.0, MEAN)):
        block = scaled(heads=heads, keep=keep, mean=np.zeros(SIZE, np.float32) if mean is None else mean)
        expected = await run(client, model, block)
        edit = HeadAblate("heads(2)", heads, keep=keep, mean=mean)
        equal(await run(client, model, interventions=[edit, *AFTER]), expected)
        assert expected.saves["after"][0].tobytes() != plain.saves["after"][0].tobytes()
    same = await run(client, model, interventions=[HeadAblate("heads(2)", [0, 1, 2, 3], keep=1.0), *AFTER])
    equal(same, plain)


async def test_a_patched_head_is_what_a_block_writes(client: Client, model: Model) -> None:
    expected = await run(client, model, replaced(head=2, place=1, value=MEAN))
    patch = Patch("heads(2)", MEAN[None], heads=2, positions=1)
    equal(await run(client, model, interventions=[patch, *AFTER]), expected)


async def test_a_live_keep_turns_a_head_off_in_the_middle(client: Client, model: Model) -> None:
    edits = [HeadAblate("heads(2)", [0, 1, 2, 3], keep=Live("keep")), HeadProbe("norms", "heads(2)", reduce="norm")]
    sampling = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    async with (
        held_up(client, model),
        client.trace(model, "import os\n", interventions=edits, live={"keep": 1.0}, **sampling) as trace,
    ):
        first, asked = None, False
        async for item in trace:
            if item.type == "steered":
                first = item.first_token()
            elif item.type == "output" and item.index >= 3 and not asked:
                asked = await trace.steer(keep=0.0) is not None
        result = await trace.result()
    norms = np.stack(result.saves["norms"])
    assert first is not None
    assert norms[:first].all()
    assert not norms[first:200].any()


@tracewire.intervention
def attends(model, tracer, live):
    """The weights, and what they come to: the heads, of the values that enter the attention."""
    weights = [].save()
    heads = [].save()
    keys, values = [], []
    for _ in tracer.iter[:]:
        (q, k, v), _ = model.model.layers[2].self_attn.attn.inputs
        keys.append(k.clone().view(-1, 2, 64))
        values.append(v.clone().view(-1, 2, 64))
        every = torch.cat(keys).repeat_interleave(2, 1).float()
        found = (torch.einsum("hd,lhd->hl", q[-1].view(4, 64).float(), every) * 64**-0.5).softmax(-1)
        weights.append(found)
        heads.append(torch.einsum("hl,lhd->hd", found, torch.cat(values).repeat_interleave(2, 1).float()))


async def test_a_pattern_is_what_the_layer_attends_with(client: Client, model: Model) -> None:
    """As a block computes it; and its weights of the values are the heads that leave the attention."""
    expected = await run(client, model, attends)
    result = await run(
        client,
        model,
        interventions=[
            AttentionPattern("whole", "heads(2)", top_k=0),
            AttentionPattern("top", "heads(2)", heads=[3, 1], top_k=4),
            AttentionPattern("layers", "heads(1:4)", top_k=2),
            HeadProbe("heads", "heads(2)"),
        ],
    )
    assert result.token_ids == expected.token_ids
    prompt = result.usage.prompt_tokens
    assert [one.shape for one in result.saves["whole"]] == [(HEADS, prompt + step) for step in range(8)]
    for whole, top, layers, other in zip(
        *(result.saves[name] for name in ("whole", "top", "layers")), expected.saves["weights"], strict=True
    ):
        np.testing.assert_allclose(whole, other, rtol=1e-3, atol=1e-5)
        order = np.argsort(-whole[[3, 1]], axis=1, kind="stable")[:, :4]
        np.testing.assert_allclose(top["weights"], np.take_along_axis(whole[[3, 1]], order, 1), rtol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(whole[[3, 1]], top["positions"], 1), top["weights"], rtol=1e-5)
        assert top["positions"].dtype == np.int32
        assert layers["weights"].shape == (3, HEADS, 2)
        np.testing.assert_allclose(layers["weights"][1], -np.sort(-whole, axis=1)[:, :2], rtol=1e-5)
    for mine, other in zip(result.saves["heads"], expected.saves["heads"], strict=True):
        mine = np.asarray(mine, np.float32)
        np.testing.assert_allclose(mine, other, atol=0.02 * float(np.abs(other).max()))


async def test_a_pattern_of_a_prompt_has_a_row_for_each_position(client: Client, model: Model) -> None:
    patterns = [
        AttentionPattern("prompt", "heads(2)", heads=0, top_k=0, positions="prompt"),
        AttentionPattern("all", "heads(2)", heads=0, top_k=1, positions="all"),
    ]
    found = []

    async def one() -> None:
        found.append(await run(client, model, interventions=patterns))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(one)
    for result in found:
        (whole,) = result.saves["prompt"]
        rows = whole[:, 0]
        assert rows.shape == (result.usage.prompt_tokens,) * 2
        np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-4)
        assert not np.triu(rows, 1).any()
        tops = np.concatenate([one["weights"][:, 0, 0] for one in result.saves["all"]])
        assert len(tops) == result.usage.prompt_tokens + 7
        np.testing.assert_allclose(tops[: len(rows)], rows.max(1), rtol=1e-5)
        np.testing.assert_allclose(rows, found[0].saves["prompt"][0][:, 0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("one", "field"),
    [
        (HeadProbe("h", "heads(2)", heads=4), "heads"),
        (HeadAblate("heads(2)", [0], mean=np.ones(SIZE + 1)), "mean"),
        (HeadAblate("residual(2)", 0), "at"),
        (Patch("heads(2)", np.ones((1, SIZE)), heads=0, positions=500), "positions"),
    ],
)
async def test_what_does_not_fit_never_reaches_the_engine(client: Client, model: Model, one: Any, field: str) -> None:
    with pytest.raises(TraceRejected) as caught:
        await run(client, model, interventions=[one])
    assert caught.value.field == f"interventions[0].{field}"


async def test_the_code_of_the_page_runs(client: Client, model: Model) -> None:
    """docs/heads.md."""
    scope: dict[str, Any] = {"client": client, "model": model}
    await run_page(ROOT / "docs" / "heads.md", scope)
    assert scope["norms"].shape[1:] == (8, HEADS)
