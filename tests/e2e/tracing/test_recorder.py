"""On a real engine: changes at given tokens, given tokens, recordings that run again, and forks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import tracewire
from tests.support import ROOT
from tests.support.blocks.steering import scheduled, steered
from tests.support.cells import run_page
from tests.support.engine_process import started_engine
from tests.support.steering import PROMPT, direction, held_up, schedule_of, steer_along
from tracewire import Client, Live, Model, Probe, Recording, Steer

PATIENCE = 120
TOKENS = 48
SAMPLED = {"max_tokens": TOKENS, "temperature": 0.8, "seed": 11, "ignore_eos": True}


def declared(model: Model) -> list[Any]:
    """Steering along a direction, and what it comes to two layers later."""
    vector = direction(model)
    return [Steer("residual(1)", vector, scale=Live("alpha")), Probe("projection", "residual(3)", weight=vector)]


async def recorded(client: Client, model: Model, **options: Any) -> tuple[Recording, list[Any]]:
    """A trace that was steered twice, and its items."""
    async with client.trace(
        model, PROMPT, interventions=declared(model), live={"alpha": 0.0}, **SAMPLED, **options
    ) as one:
        items = await steer_along(one, [3.0, -2.0], 12, in_turn=True)
        return await one.record(), items


async def test_a_schedule_holds_from_exactly_its_tokens_on(client: Client, model: Model) -> None:
    """In a block, and in declared interventions, as a block does that counts by itself."""
    vector = direction(model)
    schedule = {0: {"alpha": 1.5}, 7: {"alpha": 3.0}, 20: {"alpha": -2.0}}
    expected = [1.5] * 7 + [3.0] * 13 + [-2.0] * (TOKENS - 20)
    greedy = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    known = await client.trace(model, PROMPT, scheduled(direction=vector, schedule=expected), **greedy).result()
    block = await client.trace(
        model, PROMPT, steered(direction=vector), live={"alpha": 0.0}, schedule=schedule, **greedy
    ).result()
    assert block.saves["used"][:TOKENS] == expected
    assert block.token_ids == known.token_ids
    for one, other in zip(block.saves["norms"], known.saves["norms"], strict=True):
        assert np.array_equal(one, other)
    # Several choices are at different tokens in one step.
    trace = client.trace(
        model,
        prompts=[PROMPT, "x"],
        block=steered(direction=vector),
        live={"alpha": 0.0},
        schedule=schedule,
        n=2,
        **{**greedy, "temperature": 1.0, "seed": 3},
    )
    for invoke in (await trace.result()).invokes:
        for choice in invoke.choices:
            assert choice.saves["used"][:TOKENS] == expected
    items = [item async for item in client.subscribe(trace.id)]
    assert schedule_of(items, 0.0, TOKENS, (1, 1)) == expected


async def test_given_tokens_are_the_trace_s_tokens(client: Client, model: Model) -> None:
    """And a seed's later draws are those of a trace that drew them itself."""
    own = await client.trace(model, PROMPT, **SAMPLED).result()
    plain = await client.trace(model, PROMPT, forced_tokens=own.token_ids[:20], **SAMPLED).result()
    assert plain.token_ids == own.token_ids
    forced = [5, 6, 7]
    for more in ({}, {"interventions": declared(model), "live": {"alpha": 0.0}}):
        result = await client.trace(model, PROMPT, forced_tokens=forced, **SAMPLED, **more).result()
        assert result.token_ids[:3] == forced
        assert len(result.token_ids) == TOKENS
    with pytest.raises(tracewire.TraceRejected, match="expected a token id below") as caught:
        await client.trace(model, PROMPT, forced_tokens=[0, 10**6], **SAMPLED).result()
    assert caught.value.field == "forced_tokens[1]"


async def test_a_recording_runs_again_the_same(client: Client, model: Model, tmp_path: Path) -> None:
    with anyio.fail_after(PATIENCE):
        async with held_up(client, model):
            recording, items = await recorded(client, model)
            recording.save(tmp_path / "t.twrec")
            read = Recording.open(tmp_path / "t.twrec")
            found = await client.replay(read)
    assert found.same, str(found)
    assert found.notes == []
    assert len(read.engine.versions["weights"]) == 32
    alphas = schedule_of(items, 0.0, TOKENS)
    assert len(set(alphas)) == 3
    again = [event async for event in client.subscribe(found.trace_id)]
    assert schedule_of(again, 0.0, TOKENS) == alphas


# Starts two engines more.
@pytest.mark.full
async def test_another_engine_says_whether_it_is_the_same(
    client: Client, model: Model, engine_bus: str, tmp_path: Path
) -> None:
    """One of the same weights gives the same tokens; for one with a changed weight the first that differs is named."""
    with anyio.fail_after(PATIENCE):
        recording, _ = await recorded(client, model)
    folders = [tmp_path / name for name in ("same", "changed")]
    for folder in folders:
        shutil.copytree(ROOT / "examples" / "demo_model" / "model", folder)
    _change(folders[1])
    found = {}
    for folder in folders:
        options = ("--name", folder.name, "--kv-cache-memory-bytes", str(256 << 20))
        with started_engine(engine_bus, tmp_path, *options, model=str(folder)) as engine:
            # No bound here: how long an engine starts is a matter of the machine. pytest ends the test in the end.
            await anyio.to_thread.run_sync(engine.wait_ready)
            with anyio.fail_after(PATIENCE):
                found[folder.name] = await client.replay(recording, model=folder.name)
    assert found["same"].same, str(found["same"])
    assert found["same"].notes == []
    changed = found["changed"]
    assert not changed.same
    (choice,) = changed.choices
    assert choice.token is not None
    assert choice.token.recorded == recording.state().token_ids[choice.token.index]
    assert choice.token.got != choice.token.recorded
    (value,) = choice.values
    assert (value.name, value.index) == ("projection", 0)
    assert value.amount is not None
    assert value.amount > 0
    assert any("the model's files differ" in note for note in changed.notes)


def _change(folder: Path) -> None:
    """Change one row of a weight."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in sorted(weights) if "layers.1.mlp.down_proj" in name)
    weights[name][0] += 1
    save_file(weights, path, metadata={"format": "pt"})


async def test_forks_leave_at_their_token(client: Client, model: Model) -> None:
    with anyio.fail_after(PATIENCE):
        async with held_up(client, model):
            recording, items = await recorded(client, model)
        original = recording.state().token_ids
        # Behind the changes of the recording, which a fork does not have. On a busy machine they come late.
        alphas = schedule_of(items, 0.0, TOKENS)
        at = max(30, *[index + 1 for index in range(1, TOKENS) if alphas[index] != alphas[index - 1]])
        # Siblings share a batch, whose sums a CPU adds up in another order.
        async with await client.fork(recording, [{}], at=at) as alone:
            (itself,) = await alone.results()
        async with await client.fork(recording, [{}, {"alpha": 30.0}, {"alpha": 0.0}], at=at, logprobs=5) as fan:
            steps = [step async for step in fan]
            same, strong, _ = await fan.results()
    # Without other values it is the trace itself, until a sample falls the other way: the tokens before `at` are
    # computed at once, whose sums round in another way, too.
    pairs = zip(itself.token_ids, original, strict=True)
    differs = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), TOKENS)
    assert differs >= at
    # What is read as a token is sampled depends on those before it.
    values = recording.state().saves["projection"][: differs + 1]
    assert itself.saves["projection"][: differs + 1] == pytest.approx(values, rel=1e-3, abs=1e-3)
    assert strong.token_ids[:at] == same.token_ids[:at] == original[:at]
    assert strong.saves["projection"][:at] == pytest.approx(same.saves["projection"][:at], rel=1e-3, abs=1e-3)
    assert strong.saves["projection"][at] != same.saves["projection"][at]
    assert [step.index for step in steps] == list(range(at, TOKENS))
    assert steps[0].distances[0] == pytest.approx(0.0, abs=1e-3)
    assert max(step.distances[1] or 0.0 for step in steps) > 0.1
    assert fan.first_differences[1] is not None


async def test_the_code_of_the_page_runs(
    client: Client, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with anyio.fail_after(PATIENCE):
        async with held_up(client, model):
            await run_page(ROOT / "docs" / "recorder.md", {"client": client, "direction": direction(model)})
    assert "all 96 tokens are the same" in capsys.readouterr().out
