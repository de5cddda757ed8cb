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


async def test_a_patch_from_another_prompt_is_that_of_its_values(client: Client, model: Model) -> None:
    """Bit for bit that of the array, and of a block; and the prompt that gives the values is as it was."""
    values = await clean_values(client, model)
    alone = await run(client, model, prompt=CLEAN, interventions=AFTER, max_tokens=1)
    for positions, source, rows in (
        ("prompt", None, values),
        ([-1, 2], [3, 0], values[[3, 0]]),
        ("4:", 1, values[1]),
        (0, -1, values[-1]),
    ):
        patch = Patch("residual(2)", prompt=0, source=source, positions=positions)
        async with client.trace(
            model, prompts=[CLEAN, CORRUPTED], interventions=[patch, *AFTER], temperature=0.0, max_tokens=1
        ) as trace:
            given, patched_one = [invoke.choices[0] for invoke in (await trace.result()).invokes]
        expected = await run(
            client,
            model,
            prompt=CORRUPTED,
            interventions=[Patch("residual(2)", rows, positions=positions), *AFTER],
            max_tokens=1,
        )
        equal(patched_one, expected)
        equal(given, alone)
        places = [*range(len(values))][4:] if positions == "4:" else positions
        if isinstance(places, list):
            all_rows = np.broadcast_to(np.asarray(rows, np.float32), (len(places), values.shape[1]))
            block = patched(values=all_rows.copy(), places=places)
            equal(patched_one, await run(client, model, block, prompt=CORRUPTED, max_tokens=1))


async def test_prompts_take_values_in_a_row_and_at_generated_positions(client: Client, model: Model) -> None:
    """From the last prompt to the first, with a strength that is live, and several choices of the one that gives."""
    patches = [
        Patch("model.layers.2.mlp", prompt=1, source=1, positions="generated", into=0, strength=Live("much")),
        Patch("residual(3)", prompt=2, positions=1, into=[1]),
    ]
    prompts, options = [CORRUPTED, CLEAN, "import json\n"], {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    names = [Probe("mlp", "model.layers.2.mlp", positions="prompt"), Probe("stream", "residual(3)", positions="prompt")]
    several = {**options, "temperature": 0.8, "seed": 3, "n": 2}
    async with client.trace(
        model, prompts=prompts, interventions=[*patches, *names], live={"much": 0.5}, **several
    ) as trace:
        _, second, third = [[choice.saves for choice in one.choices] for one in (await trace.result()).invokes]
    for one in second:
        assert one["stream"][0][1].tobytes() in {other["stream"][0][1].tobytes() for other in third}
    by_array = [Patch("model.layers.2.mlp", second[0]["mlp"][0][1], positions="generated", strength=0.5), *AFTER]
    for strength, expected in ((0.5, by_array), (0.0, AFTER)):
        async with client.trace(
            model,
            prompts=prompts,
            interventions=[*patches, *names, *AFTER],
            live={"much": strength},
            **options,
        ) as trace:
            again = (await trace.result()).invokes[0].choices[0]
        alone = await run(client, model, prompt=CORRUPTED, interventions=expected, max_tokens=5)
        for mine, other in zip(again.saves["after"], alone.saves["after"], strict=True):
            np.testing.assert_allclose(
                np.asarray(mine, np.float32), np.asarray(other, np.float32), rtol=0.02, atol=0.25
            )


async def test_a_prompt_that_waits_ends_with_its_trace(client: Client, model: Model) -> None:
    """Where the trace is cancelled, and where the prompt that was to give the values fails."""
    patch = Patch("residual(2)", prompt=0, positions=0)
    broken = [patch, Probe("p", "model.layers.1.mlp", np.ones(7, np.float32))]
    options = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(tracewire.TraceFailed, match="does not fit"):
        await client.trace(model, prompts=[CLEAN, CORRUPTED], interventions=broken, **options).result()
    async with client.trace(model, prompts=[CLEAN, CORRUPTED], interventions=[patch], **options) as trace:
        await trace.accepted()
        await trace.pause()
        await trace.cancel()
        with pytest.raises(tracewire.TraceCancelled):
            await trace.result()
    result = await client.trace(
        model, prompts=[CLEAN, CORRUPTED], interventions=[patch], temperature=0.0, max_tokens=2
    ).result()
    assert [len(invoke.choices[0].token_ids) for invoke in result.invokes] == [2, 2]


@pytest.mark.parametrize(
    ("patch", "field", "says"),
    [
        (Patch("residual(2)", prompt=2), "prompt", "0 to 1, got 2"),
        (Patch("residual(2)", prompt=0, into=0), "into", "cannot take its own"),
        (Patch("residual(2)", prompt=0, source=99, positions=0), "source", "prompt 0: position 99 is beyond"),
        (Patch("residual(2)", prompt=0, source=0, positions=99), "positions", "prompt 1: position 99 is beyond"),
        (Patch("residual(2)", prompt=0, source="0:3", positions=0), "positions", "which are 3, got 1"),
    ],
)
async def test_prompts_and_positions_that_are_not_there(
    client: Client, model: Model, patch: Patch, field: str, says: str
) -> None:
    with pytest.raises(TraceRejected, match=says) as caught:
        await client.trace(model, prompts=[CLEAN, CORRUPTED], interventions=[patch], max_tokens=1).result()
    assert caught.value.field == f"interventions[0].{field}"


async def test_an_edit_has_no_other_prompts(client: Client, edits: Any) -> None:
    with pytest.raises(tracewire.InvalidEdit) as caught:
        await edits.install("no", interventions=[Patch("residual(2)", prompt=0)])
    assert caught.value.field == "interventions[0].prompt"


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
