"""Patches on the real engine: each equal, bit for bit, to the same thing written as a block; and sweeps."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

import tracewire
from tests.e2e.tracing.test_declared import run
from tests.support import ROOT
from tests.support.cells import run_page
from tracewire import Client, Live, Model, Patch, Probe, TraceRejected

CLEAN = "import os\n\ndef f(path):\n    return os."
CORRUPTED = "import re\n\ndef f(path):\n    return re."
AFTER = [Probe("after", "residual(4)", positions="all")]


@tracewire.intervention
def patched(model, tracer, live, values, places):
    """At positions of the prompt."""
    after = [].save()
    for step in tracer.iter[:]:
        hidden, residual = model.model.layers[2].output
        if step == 0:
            for row, place in enumerate(places):
                hidden[place] = values[row].to(hidden.dtype)
                residual[place] = 0
        after.append(model.residual(4).output.clone())


@tracewire.intervention
def module_patched(model, tracer, live, value, strength):
    after = [].save()
    for step in tracer.iter[:]:
        if step > 0:
            out = model.model.layers[2].mlp.output
            out[:] = (out.float() + strength * (value - out.float())).to(out.dtype)
        after.append(model.residual(4).output.clone())


async def clean_values(client: Client, model: Model) -> Any:
    result = await run(client, model, prompt=CLEAN, interventions=[Probe("hs", "residual(2)", positions="prompt")])
    (values,) = await result.load("hs", exact=True)
    return values


def equal(ours: Any, theirs: Any) -> None:
    assert ours.token_ids == theirs.token_ids
    assert len(ours.saves["after"]) == len(theirs.saves["after"])
    for mine, other in zip(ours.saves["after"], theirs.saves["after"], strict=True):
        assert mine.dtype.name == other.dtype.name == "bfloat16"
        assert mine.tobytes() == other.tobytes()


async def test_a_patch_is_the_block_that_writes_the_values_bit_for_bit(client: Client, model: Model) -> None:
    values = await clean_values(client, model)
    plain = await run(client, model, prompt=CORRUPTED, interventions=AFTER)
    for places in ([-1], [1, 2, 5], [*range(len(values))]):
        rows = np.asarray(values[places], np.float32)
        expected = await run(client, model, patched(values=rows, places=places), prompt=CORRUPTED)
        patch = Patch("residual(2)", rows, positions=places)
        result = await run(client, model, prompt=CORRUPTED, interventions=[patch, *AFTER])
        equal(result, expected)
        assert result.saves["after"][0].tobytes() != plain.saves["after"][0].tobytes()
    # The whole stream of one prompt in the other: from there on it is the other, but for the rounding of the stream.
    clean = await run(client, model, prompt=CLEAN, interventions=AFTER)
    mine, other = (np.asarray(one.saves["after"][0], np.float32) for one in (result, clean))
    assert np.abs(mine - other).max() < 0.05 * np.abs(other).max()


async def test_patches_of_many_requests_in_one_step_are_those_of_each(client: Client, model: Model) -> None:
    values = await clean_values(client, model)
    patches = [Patch("residual(2)", values[place], positions=place, strength=0.5 + place % 2) for place in range(8)]
    alone = [await run(client, model, prompt=CORRUPTED, interventions=[patch, *AFTER]) for patch in patches]
    found: dict[int, Any] = {}

    async def one(place: int) -> None:
        found[place] = await run(client, model, prompt=CORRUPTED, interventions=[patches[place], *AFTER])

    async with anyio.create_task_group() as group:
        for place in range(8):
            group.start_soon(one, place)
    for place in range(8):
        np.testing.assert_allclose(
            np.asarray(found[place].saves["after"][0], np.float32),
            np.asarray(alone[place].saves["after"][0], np.float32),
            rtol=2e-2,
            atol=2e-1,
        )


async def test_generated_positions_of_a_module_with_a_live_strength(client: Client, model: Model) -> None:
    value = np.linspace(-1, 1, 256, dtype=np.float32)
    patch = Patch("model.layers.2.mlp", value, positions="generated", strength=Live("strength"))
    for strength in (1.0, 0.25, 0.0):
        expected = await run(client, model, module_patched(value=value, strength=strength))
        result = await run(client, model, interventions=[patch, *AFTER], live={"strength": strength})
        assert result.token_ids == expected.token_ids
        for mine, other in zip(result.saves["after"], expected.saves["after"], strict=True):
            np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(other, np.float32), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        (Patch("residual(2)", np.ones(256), positions=999), "interventions[0].positions"),
        (Patch("residual(2)", np.ones((2, 256)), positions="prompt"), "interventions[0].values"),
        (Patch("residual(2)", np.ones(255)), "interventions[0].values"),
    ],
)
async def test_what_does_not_fit_never_reaches_the_engine(
    client: Client, model: Model, patch: Patch, field: str
) -> None:
    with pytest.raises(TraceRejected) as caught:
        await run(client, model, interventions=[patch])
    assert caught.value.field == field


async def test_the_code_of_the_page_runs(client: Client, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/patching.md, and its sweep against one that is done by hand."""
    scope: dict[str, Any] = {"client": client, "model": model}
    await run_page(ROOT / "docs" / "patching.md", scope)
    assert "interventions[0].positions" in capsys.readouterr().out
    sweep = scope["sweep"]
    assert sweep.values.shape == (3, 3)
    clean, corrupted = scope["clean"], scope["corrupted"]
    reads = [Probe("hs", "residual(3)", positions="prompt")]
    (values,) = await (await run(client, model, prompt=clean, interventions=reads)).load("hs", exact=True)
    tokens = [model.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("path", "sub")]
    patch = Patch("residual(3)", values[-1])
    async with client.trace(
        model, corrupted, interventions=[patch], temperature=0.0, max_tokens=1, logprob_token_ids=tokens
    ) as trace:
        (output,) = [output async for output in trace.outputs()]
    first, second = (output.logprobs[0][token][0] for token in tokens)
    assert sweep.values[1, 2] == pytest.approx(first - second, abs=0.1)
    assert sweep.positions == [1, len(values) - 2, len(values) - 1]
