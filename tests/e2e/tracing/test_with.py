"""Blocks written as the body of a `with`, on the real engine, and what nnsight's `tracer` and `model` do in them.

The shared engine compares what every trace here saves with what nnsight's own collect returns.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import nnsight
import numpy as np
import pytest
import torch

import tracewire
from tests.support import ROOT
from tests.support.engine_process import EngineProcess
from tracewire import (
    Client,
    InterventionError,
    Model,
    Output,
    Probe,
    Shared,
    TraceRejected,
    UnknownOption,
    intervention,
)

PROMPT = "The Eiffel Tower is in"
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
PATIENCE = 60


@pytest.fixture
async def client(engine: EngineProcess, engine_bus: str) -> AsyncIterator[Client]:
    """A client of the shared engine's bus."""
    async with tracewire.connect(engine_bus) as client:
        yield client


@pytest.fixture
async def model(client: Client) -> Model:
    """The demo model as the client sees it."""
    return await client.models.get("demo", timeout=30)


def float32(value):
    """A saved array, for arithmetic."""
    return np.asarray(value).astype(np.float32)


async def failed(tracer) -> InterventionError:
    with pytest.raises(InterventionError) as caught:
        await tracer.result()
    return caught.value


# --- both forms -------------------------------------------------------------------------------------------------------


async def test_the_issue_s_own_example(model: Model) -> None:
    with model.trace("The Eiffel Tower is in", max_tokens=5, temperature=0.0) as tracer:
        logits = model.logits.save()
    texts = [output.text async for output in tracer]
    assert "".join(texts) == (await tracer.result()).text
    assert tracer.saves["logits"].shape == (1, model.info.vocabulary)
    assert "logits" not in locals()


async def test_both_forms_save_the_same(client: Client, model: Model) -> None:
    direction, layer = np.linspace(-1, 1, model.info.hidden_size, dtype=np.float32), 3

    @intervention
    def watch(lm, tracer, live, direction, layer):
        scores = [].save()
        for step in tracer.iter[:]:
            hidden = lm.residual(layer).output[-1].float()
            scores.append((hidden @ direction).item() + live.alpha)
        last = hidden.save()

    block, live = watch(direction=direction, layer=layer), {"alpha": 0.5}
    async with client.trace(model, PROMPT, block, live=live, **GREEDY) as trace:
        one = await trace.result()
    with model.trace(PROMPT, live=live, **GREEDY) as tracer:
        scores = [].save()
        for step in tracer.iter[:]:
            hidden = model.residual(layer).output[-1].float()
            scores.append((hidden @ direction).item() + tracer.live.alpha)
        last = nnsight.save(hidden)
    two = await tracer.result()
    assert len(two.saves["scores"]) == GREEDY["max_tokens"]
    assert one.digest() == two.digest()
    assert one.token_ids == two.token_ids


@pytest.mark.parametrize("form", ["with", "def"])
async def test_steps_by_index_list_and_slice(client: Client, model: Model, form: str) -> None:
    @intervention
    def steps(model, tracer, live):
        listed, one, some = [].save(), [].save(), [].save()
        for step in tracer.iter[[0, 2]]:
            listed.append((step, model.model.layers[1].output[0].shape[0]))
        for step in tracer.iter[3]:
            one.append((step, model.samples.item()))
        for step in tracer.iter[4:6]:
            some.append((step, model.samples.item()))
        some.append("after")

    options = {**GREEDY, "max_tokens": 8}
    if form == "def":
        trace = client.trace(model, PROMPT, steps, **options)
        async with trace:
            result = await trace.result()
    else:
        with model.trace(PROMPT, **options) as tracer:
            listed, one, some = [].save(), [].save(), [].save()
            for step in tracer.iter[[0, 2]]:
                listed.append((step, model.model.layers[1].output[0].shape[0]))
            for step in tracer.iter[3]:
                one.append((step, model.samples.item()))
            for step in tracer.iter[4:6]:
                some.append((step, model.samples.item()))
            some.append("after")
        result = await tracer.result()
    ids, prompt = result.token_ids, result.usage.prompt_tokens
    assert result.saves["listed"] == [(0, prompt), (2, 1)]
    assert result.saves["one"] == [(3, ids[3])]
    assert result.saves["some"] == [(4, ids[4]), (5, ids[5]), "after"]


async def test_all_steps(model: Model) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        steps = [].save()
        for step in tracer.all():
            steps.append((step, model.samples.item()))
    result = await tracer.result()
    assert result.saves["steps"] == list(enumerate(result.token_ids))


async def test_a_loop_that_outruns_its_request_is_cut_short(model: Model) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        steps = [].save()
        for step in tracer.iter[:9]:
            steps.append(model.logits.argmax(-1).item())
        steps.append("after the loop")
    result = await tracer.result()
    assert result.saves["steps"] == result.token_ids


@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_stop_ends_at_the_token_that_it_is_called_at(model: Model, ignore_eos: bool) -> None:
    with model.trace(PROMPT, max_tokens=30, min_tokens=10, temperature=0.0, ignore_eos=ignore_eos) as tracer:
        steps = [].save()
        for step in tracer.iter[:]:
            steps.append(model.logits.argmax(-1).item())
            if step == 1:
                tracer.stop()
    result = await tracer.result()
    assert (result.status, len(result.token_ids)) == ("stopped", 2)
    assert result.saves["steps"] == result.token_ids


# --- what is generated ------------------------------------------------------------------------------------------------


async def test_logits_read_and_assigned(model: Model) -> None:
    token = 7
    with model.trace(PROMPT, **GREEDY) as tracer:
        drawn = [].save()
        for step in tracer.iter[:]:
            clean = model.logits.argmax(-1).item()
            forced = torch.full_like(model.logits, -1e4)
            forced[:, token] = 1e4
            model.logits = forced
            drawn.append((clean, model.samples.item()))
    result = await tracer.result()
    assert result.token_ids == [token] * 4
    assert [sampled for _, sampled in result.saves["drawn"]] == result.token_ids
    assert result.saves["drawn"][0][0] != token


async def test_logits_edited_in_place_and_saved_as_they_were_before_the_sampler(model: Model) -> None:
    with model.trace(PROMPT, temperature=0.5, seed=0, max_tokens=1) as tracer:
        model.logits[:, 1234] = 1e4
        logits = model.logits.save()
        copy = model.logits.clone().save()
    result = await tracer.result()
    assert result.token_ids == [1234]
    assert np.array_equal(float32(result.saves["logits"]), float32(result.saves["copy"]))
    assert (
        float32(result.saves["logits"])[0, 1234] == np.float32(9984) or float32(result.saves["logits"])[0, 1234] > 9e3
    )


async def test_samples_read_and_assigned(model: Model) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        drawn = [].save()
        for step in tracer.iter[:]:
            drawn.append((model.logits.argmax(-1).item(), model.samples.item()))
            model.samples = torch.full_like(model.samples, 9)
    result = await tracer.result()
    assert result.token_ids == [9] * 4
    assert all(first == second for first, second in result.saves["drawn"])


async def test_the_result_is_the_finished_output(client: Client, model: Model) -> None:
    @intervention
    def asks(model, tracer, live):
        ids = [].save()
        for step in tracer.iter[:4]:
            ids.append(model.samples.item())
        result = tracer.result
        text = result.outputs[0].text.save()
        same = (list(result.outputs[0].token_ids) == ids).save()

    async with client.trace(model, PROMPT, asks, **GREEDY) as trace:
        first = await trace.result()
    assert first.saves["same"] is True
    assert first.saves["text"] == first.text
    with model.trace(PROMPT, **GREEDY, logprobs=1) as tracer:
        hidden = model.model.layers[1].output[0][-1].clone().save()
        result = tracer.result.save()
        logprob = result.outputs[0].cumulative_logprob.save()
        kind = type(result).__name__.save()
    second = await tracer.result()
    saved = tracer.saves["result"]
    assert second.saves["kind"] == "RequestOutput"
    assert saved["prompt"] == PROMPT
    assert len(saved["prompt_token_ids"]) == second.usage.prompt_tokens
    (output,) = saved["outputs"]
    assert (output["text"], output["token_ids"]) == (second.text, second.token_ids)
    assert (output["finish_reason"], saved["finished"]) == ("length", True)
    assert output["cumulative_logprob"] == second.saves["logprob"] < 0
    assert second.saves["hidden"].shape == (model.info.hidden_size,)


async def test_the_result_of_several_choices_is_one_output(model: Model) -> None:
    with model.trace(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=3) as tracer:
        texts = [output.text for output in tracer.result.outputs].save()
    result = await tracer.result()
    expected = [choice.text for choice in result.invokes[0].choices]
    assert len(expected) == 3
    assert tracer.saves["texts"] == [expected] * 3


async def test_nothing_is_read_after_the_result(model: Model) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        text = tracer.result.outputs[0].text.save()
        logits = model.logits.save()
    error = await failed(tracer)
    assert error.type == "OutOfOrderError"
    assert error.source == "logits = model.logits.save()"
    assert error.result.saves["text"] == error.result.text


async def test_a_result_that_was_cut_short(model: Model) -> None:
    with model.trace(PROMPT, max_tokens=1500, ignore_eos=True, temperature=0.0) as tracer:
        result = tracer.result.save()
    await anext(aiter(tracer))
    assert await tracer.cancel("enough")
    with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="enough"):
        await tracer.result()
    held = tracer.state()
    assert held.saves["result"]["outputs"][0]["token_ids"] == held.token_ids


# --- inside the model -------------------------------------------------------------------------------------------------


async def test_inputs_read_and_edited(model: Model) -> None:
    layer = model.model.layers[3]
    with model.trace(PROMPT, **GREEDY) as tracer:
        arguments, named = layer.inputs
        count = (len(arguments), list(named)).save()
        before = layer.mlp.input.clone().save()
        layer.mlp.input = torch.zeros_like(layer.mlp.input)
        after = layer.mlp.output.clone().save()
    saves = (await tracer.result()).saves
    assert saves["count"] == (3, [])
    assert saves["before"].shape[1] == model.info.hidden_size
    assert np.any(float32(saves["before"]) != 0)
    assert np.all(float32(saves["after"]) == 0)


async def test_modules_called_ad_hoc(model: Model) -> None:
    """A logit lens: at the last layer it is what the model itself says."""
    count, norm = model.info.layer_count, model.model.norm
    with model.trace(PROMPT, **GREEDY) as tracer:
        lens = [].save()
        for index in range(count):
            stream = model.residual(index).output
            lens.append(model.logits_processor(model.lm_head, norm(stream[-1:]))[0].float())
        logits = model.logits[0].float().clone().save()
    saves = (await tracer.result()).saves
    assert len(saves["lens"]) == count
    # The model adds and scales in one kernel.
    assert np.allclose(saves["lens"][-1], saves["logits"], atol=0.1)
    assert not np.allclose(saves["lens"][0], saves["logits"], atol=0.1)


async def test_an_operation_inside_a_forward(model: Model) -> None:
    mlp = model.model.layers[0].mlp
    with model.trace(PROMPT, **GREEDY) as tracer:
        operations = str(mlp.source).save()
        up = mlp.source.self_gate_up_proj_0.output[0].clone().save()
        mlp.source.self_down_proj_0.output[0][:] *= 2
        down = mlp.source.self_down_proj_0.output[0].clone().save()
        whole = mlp.output.clone().save()
    saves = (await tracer.result()).saves
    assert "self_down_proj_0" in saves["operations"]
    assert saves["up"].shape[1] > saves["down"].shape[1] == model.info.hidden_size
    assert np.array_equal(float32(saves["down"]), float32(saves["whole"]))


async def test_a_cache_keeps_every_visit(model: Model) -> None:
    first, last = model.model.layers[0], model.model.layers[-1]
    with model.trace(PROMPT, **GREEDY) as tracer:
        cache = tracer.cache(modules=[first, last.mlp], include_inputs=True)
        seen = [].save()
        for step in tracer.iter[:]:
            seen.append((first.output[0].clone(), last.mlp.output.clone()))
    items = [item async for item in tracer]
    result = await tracer.result()
    cache, prompt = result.saves["cache"], result.usage.prompt_tokens
    assert list(cache) == ["model.model.layers.0", "model.model.layers.7.mlp"]
    for visits in cache.values():
        assert len(visits) == 4
    for step, (hidden, mlp) in enumerate(result.saves["seen"]):
        assert np.array_equal(float32(cache["model.model.layers.0"][step]["output"][0]), float32(hidden))
        assert np.array_equal(float32(cache["model.model.layers.7.mlp"][step]["output"]), float32(mlp))
        assert len(mlp) == (prompt if step == 0 else 1)
        (arguments, named) = cache["model.model.layers.7.mlp"][step]["inputs"]
        assert (arguments[0].shape, named) == (mlp.shape, {})
    # What a step added came with its token.
    grown = [len(item.delta["cache"]["model.model.layers.0"]) for item in items if item.token_ids]
    assert sum(grown) == 4


async def test_a_cache_of_each_invoke_and_of_all_modules(model: Model) -> None:
    with model.trace(**{**GREEDY, "max_tokens": 2}) as tracer:
        with tracer.invoke("one"):
            cache = tracer.cache()
        with tracer.invoke("one two three four"):
            cache = tracer.cache(modules=["model.model.layers.2"])
    result = await tracer.result()
    (whole,), (one,) = ([choice.saves["cache"] for choice in invoke.choices] for invoke in result.invokes)
    assert {"model.model.layers.0", "model.model.norm", "model.lm_head"} & set(whole) >= {"model.model.norm"}
    assert list(one) == ["model.model.layers.2"]
    tokens = result.accepted.prompt_tokens
    assert whole["model.model.layers.2"][0]["output"][0].shape[0] == tokens[0]
    assert one["model.model.layers.2"][0]["output"][0].shape[0] == tokens[1]
    assert not result.save_errors


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_errors_are_at_the_caller_s_own_line(model: Model) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        later = model.model.layers[3].output
        earlier = model.model.layers[1].output
    error = await failed(tracer)
    assert (error.type, error.source) == ("OutOfOrderError", "earlier = model.model.layers[1].output")
    assert error.filename == __file__
    assert "already ran past" in str(error)

    with model.trace(PROMPT, **GREEDY) as tracer:
        later = model.model.layers[3].output
        model.model.layers[1].output = later
    assert "already ran past" in str(await failed(tracer))

    with model.trace(PROMPT, **GREEDY) as tracer:
        meeting = tracer.barrier(2)
    assert "each invoke is its own request" in str(await failed(tracer))

    with model.trace(PROMPT, **GREEDY) as tracer:
        inner = tracer.invoke("x")
    assert "while the model is already running" in str(await failed(tracer))

    with model.trace(PROMPT, **GREEDY) as tracer:
        logits = model.logits.save()
    assert len((await tracer.result()).token_ids) == 4


async def test_sampling_params_that_are_none_are_refused(model: Model) -> None:
    with pytest.raises(UnknownOption, match="did you mean 'temperature'"):
        model.trace(PROMPT, temperatur=0.0)
    with model.trace(PROMPT, extra_sampling={"temperatur": 0.0}) as tracer:
        logits = model.logits.save()
    with pytest.raises(TraceRejected, match="temperature") as caught:
        await tracer.result()
    assert caught.value.field == "sampling.temperatur"


# --- several invokes --------------------------------------------------------------------------------------------------


async def test_each_invoke_has_its_own_block_rows_and_sampling(model: Model) -> None:
    with model.trace(max_tokens=6, ignore_eos=True, temperature=0.0) as tracer:
        with tracer.invoke("one"):
            first = model.model.layers[0].output[0].clone().save()
            name = (1).save()
        with tracer.invoke("a longer prompt than that", max_tokens=3):
            ids = [].save()
            for step in tracer.iter[:]:
                ids.append(model.samples.item())
            name = (2).save()
        with tracer.invoke("no block"):
            pass
    result = await tracer.result()
    one, two, three = (invoke.choices[0] for invoke in result.invokes)
    assert [len(choice.token_ids) for choice in (one, two, three)] == [6, 3, 6]
    assert one.saves["first"].shape[0] == result.accepted.prompt_tokens[0]
    assert two.saves["ids"] == two.token_ids
    assert set(one.saves) == {"first", "name"}
    assert three.saves == {}
    assert tracer.saves["ids"] == two.token_ids
    assert [one["temperature"] for one in result.accepted.sampling] == [0.0, 0.0, 0.0]


async def test_clean_and_edited_beside_each_other(model: Model) -> None:
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        for scale in (1.0, 0.0):
            with tracer.invoke(PROMPT):
                model.model.layers[-2].mlp.output[:] *= scale
                hidden = model.model.layers[-2].mlp.output.clone().save()
                logits = model.logits.save()
    await tracer.result()
    clean, edited = tracer.saves["hidden"]
    assert np.any(float32(clean) != 0)
    assert np.all(float32(edited) == 0)
    one, two = tracer.saves["logits"]
    assert not np.array_equal(float32(one), float32(two))


async def test_a_value_handed_to_the_next_trace(model: Model) -> None:
    with model.trace(PROMPT, max_tokens=1) as tracer:
        donor = model.model.layers[2].output[0].clone().save()
    await tracer.result()
    donor = float32(tracer.saves["donor"])
    with model.trace(PROMPT, max_tokens=1) as tracer:
        model.model.layers[2].output[0][:] = torch.as_tensor(donor)
        same = model.model.layers[2].output[0].float().clone().save()
    await tracer.result()
    assert np.array_equal(tracer.saves["same"], donor)


async def test_declared_interventions_of_the_trace_apply_to_each_invoke(model: Model) -> None:
    with model.trace(interventions=[Probe("norm", at="residual(2)", reduce="norm")], **GREEDY) as tracer:
        with tracer.invoke("one"):
            norms = [].save()
            for step in tracer.iter[:]:
                norms.append(model.residual(2).output[-1].float().norm().item())
        with tracer.invoke("two three"):
            pass
    result = await tracer.result()
    one, two = (invoke.choices[0].saves for invoke in result.invokes)
    assert np.allclose(one["norm"], one["norms"], rtol=1e-2)
    assert len(two["norm"]) == 4
    assert "norms" not in two


# --- what the invokes share -------------------------------------------------------------------------------------------


async def test_a_shared_container_is_one_object_for_all_invokes(model: Model) -> None:
    with model.trace(**GREEDY) as tracer:
        rows, slots = [].save(), [None, None, None].save()
        for index, text in enumerate(["one", "two two two", "three"]):
            with tracer.invoke(text, max_tokens=2 + index):
                for step in tracer.iter[:]:
                    rows.append((index, step, model.samples.item()))
                    slots[index] = len(rows)
    items = [item async for item in tracer]
    result = await tracer.result()
    rows = tracer.saves["rows"]
    expected = {
        (invoke.index, step, token)
        for invoke in result.invokes
        for step, token in enumerate(invoke.choices[0].token_ids)
    }
    assert len(rows) == 2 + 3 + 4
    assert set(rows) == expected
    # Each saw what the others had appended: in the last step there was all of it.
    assert slots_of(result) == [rows.index(last(rows, index)) + 1 for index in range(3)]
    assert result.shared == {"rows": rows, "slots": slots_of(result)}
    assert all(not invoke.choices[0].saves for invoke in result.invokes)
    # It came as events of the trace, each item once.
    gains = [item for item in items if isinstance(item, Shared)]
    assert [row for item in gains for row in item.delta["rows"]] == rows
    assert {(item.invoke, item.text, tuple(item.token_ids)) for item in gains} == {(-1, "", ())}
    assert {item.invoke for item in items if isinstance(item, Output)} == {0, 1, 2}
    assert {(entry.invoke, entry.name) for entry in result.manifest} == {(-1, "rows"), (-1, "slots")}


async def test_what_is_shared_is_told_while_it_runs(model: Model) -> None:
    with model.trace(live={"over": False}, max_tokens=1500, ignore_eos=True, temperature=0.0) as tracer:
        rows = [].save()
        with tracer.invoke("one"):
            for step in tracer.iter[:]:
                rows.append(step)
                if tracer.live.over:
                    tracer.stop()
    told = []
    with anyio.fail_after(PATIENCE):
        async for item in tracer:
            if isinstance(item, Shared):
                told.append(item.delta["rows"])
                if len(told) == 1:
                    await tracer.steer(over=True)
        result = await tracer.result()
    assert result.status == "stopped"
    assert len(told) > 1
    assert [row for rows in told for row in rows] == tracer.saves["rows"] == list(range(len(result.token_ids)))


def slots_of(result):
    return result.shared["slots"]


def last(rows, index):
    """The last row of an invoke."""
    return [row for row in rows if row[0] == index][-1]


async def test_choices_share_it_too(model: Model) -> None:
    with model.trace(max_tokens=3, temperature=1.0, ignore_eos=True) as tracer:
        seen = {"ids": []}.save()
        with tracer.invoke("one", n=3, seed=3):
            for step in tracer.iter[:]:
                seen["ids"].append(model.samples.item())
        with tracer.invoke("two", seed=4):
            for step in tracer.iter[:]:
                seen["ids"].append(model.samples.item())
    result = await tracer.result()
    ids = [token for invoke in result.invokes for choice in invoke.choices for token in choice.token_ids]
    assert sorted(tracer.saves["seen"]["ids"]) == sorted(ids)
    assert len(ids) == 12


async def test_invokes_that_the_scheduler_runs_one_after_the_other(model: Model) -> None:
    """More of them than the engine runs at once: what was shared outlives those that are over."""
    count = 300
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        seen, total = [].save(), np.zeros(1).save()
        for index in range(count):
            with tracer.invoke([index + 1]):
                seen.append((index, model.samples.item()))
                total += 1
    result = await tracer.result()
    assert sorted(tracer.saves["seen"]) == [(invoke.index, invoke.choices[0].token_ids[0]) for invoke in result.invokes]
    assert tracer.saves["total"] == [count]


async def test_an_invoke_that_fails_leaves_what_was_shared(model: Model) -> None:
    with model.trace(**GREEDY) as tracer:
        rows = [].save()
        with tracer.invoke("one"):
            for step in tracer.iter[:]:
                rows.append((0, step, model.samples.item()))
        with tracer.invoke("two"):
            for step in tracer.iter[:]:
                rows.append((1, step, model.samples.item()))
                if step == 1:
                    raise ValueError("no more")
    error = await failed(tracer)
    assert (error.type, error.source) == ("ValueError", 'raise ValueError("no more")')
    rows = error.result.shared["rows"]
    ids = [invoke.choices[0].token_ids for invoke in error.result.invokes]
    assert [row[1:] for row in rows if row[0] == 0] == list(enumerate(ids[0]))
    assert [row[1:] for row in rows if row[0] == 1] == list(enumerate(ids[1]))
    assert [len(each) for each in ids] == [4, 2]


async def test_a_shared_value_of_a_trace_that_was_cancelled(model: Model) -> None:
    with model.trace(max_tokens=500, ignore_eos=True, temperature=0.0) as tracer:
        rows = [].save()
        for index in range(2):
            with tracer.invoke(f"prompt {index}"):
                for step in tracer.iter[:]:
                    rows.append((index, model.samples.item()))
    iterator = aiter(tracer)
    for _ in range(8):
        await anext(iterator)
    await tracer.cancel("enough")
    with anyio.fail_after(PATIENCE), pytest.raises(tracewire.TraceFailed, match="enough"):
        await tracer.result()
    state = tracer.state()
    for invoke in state.invokes:
        ids = [token for index, token in state.shared["rows"] if index == invoke.index]
        assert ids[: len(invoke.choices[0].token_ids)] == invoke.choices[0].token_ids


async def test_a_trace_that_was_refused_halfway_leaves_the_engine_nothing(model: Model) -> None:
    with model.trace(max_tokens=3) as tracer:
        rows = [].save()
        with tracer.invoke("one"):
            rows.append(model.samples.item())
        with tracer.invoke("two", logprobs=5000):
            rows.append(model.samples.item())
    with pytest.raises(TraceRejected):
        await tracer.result()


async def test_large_arrays_among_what_is_shared(model: Model) -> None:
    with model.trace(**GREEDY) as tracer:
        rows = [].save()
        with tracer.invoke("one", max_tokens=1):
            rows.append(torch.ones(300, 300))
            model.logits
            rows[0][0] = 5
        with tracer.invoke("two", max_tokens=3):
            for step in tracer.iter[:]:
                rows.append(model.logits[0].clone())
    result = await tracer.result()
    large = [row for row in result.shared["rows"] if isinstance(row, tracewire.ArrayRef)]
    small = [row for row in result.shared["rows"] if not isinstance(row, tracewire.ArrayRef)]
    (array,) = [await row.load() for row in large]
    assert (array[0].tolist(), array[1:].min(), array[1:].max()) == ([5.0] * 300, 1.0, 1.0)
    assert len(small) == 3


async def test_what_is_shared_cannot_travel_in_part(model: Model) -> None:
    with model.trace(max_tokens=1) as tracer:
        good, bad = [].save(), [].save()
        with tracer.invoke("one"):
            good.append(model.samples.item())
            bad.append(object())
    result = await tracer.result()
    assert list(result.shared) == ["good"]
    assert list(result.save_errors) == ["-1.0.bad"]


async def test_functions_share_by_an_argument_of_the_trace(client: Client, model: Model) -> None:
    @intervention
    def collect(model, tracer, live, seen, counts):
        for step in tracer.iter[:]:
            seen.append(model.samples.item())
            counts[step] += 1

    shared = {"seen": [], "counts": np.zeros(4, dtype=np.int64)}
    async with client.trace(model, prompts=["one", "two"], block=collect, shared=shared, **GREEDY) as trace:
        result = await trace.result()
    ids = [token for invoke in result.invokes for token in invoke.choices[0].token_ids]
    assert sorted(result.shared["seen"]) == sorted(ids)
    assert result.shared["counts"].tolist() == [2, 2, 2, 2]


async def test_who_follows_a_trace_sees_what_is_shared(client: Client, model: Model) -> None:
    with model.trace(**GREEDY) as tracer:
        rows = [].save()
        with tracer.invoke("one"):
            for step in tracer.iter[:]:
                rows.append(model.samples.item())
    result = await tracer.result()
    events = [event async for event in client.subscribe(tracer.id, names={"rows"})]
    assert [row for event in events if isinstance(event, Shared) for row in event.delta["rows"]] == result.shared[
        "rows"
    ]
    assert (await client.get_state(tracer.id)).shared == result.shared
    none = [event async for event in client.subscribe(tracer.id, names={"other"})]
    assert all(event.delta == {} for event in none if isinstance(event, Shared))


# --- the page ---------------------------------------------------------------------------------------------------------


async def test_the_code_of_the_page_runs(client: Client, model: Model, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "nnsight.md").read_text()
    pieces = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(pieces) == 3
    for number, piece in enumerate(pieces):
        path = tmp_path / f"page_{number}.py"
        main = "import tracewire\n\nasync def main(client, model):\n"
        path.write_text(main + textwrap.indent(piece, "    ") + "    return tracer\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tracer = await module.main(client, model)
        assert tracer.status == "finished"
        assert tracer.saves
