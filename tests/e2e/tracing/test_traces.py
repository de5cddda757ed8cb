"""Traces on the real engine: what blocks save arrives step by step, and folds to what nnsight collects.

The shared engine checks every trace here against nnsight's own collect: `result()` compares its fold with digests of
what that returned, bit for bit, and raises if one differs.
"""

from __future__ import annotations

from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tests.support.equality import equal
from tracewire import Client, InterventionError, Model, Output
from tracewire_bus.domain.fold import Fold
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.messages import Append, Final, Set

PROMPT = "def add(a, b):\n    return"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


async def events_of(client: Client, trace: str, since: str = "start") -> list[Any]:
    return [event async for event in client.subscribe(trace, since=since)]


async def run(client: Client, model: Model, block: Any, prompt: Any = PROMPT, **options: Any) -> tuple[Any, list[Any]]:
    async with client.trace(model, prompt, block, **{**GREEDY, "max_tokens": 6, **options}) as trace:
        result = await trace.result()
        return result, await events_of(client, trace.id)


def outputs(events: list[Any]) -> list[Output]:
    return [event for event in events if isinstance(event, Output)]


def assert_every_token_once(events: list[Any], count: int) -> None:
    """Every token index in exactly one output, each with the deltas of its own step."""
    indices = [output.index + k for output in outputs(events) for k in range(len(output.token_ids))]
    assert indices == list(range(count))
    assert all(len(output.deltas) == len(output.token_ids) for output in outputs(events))


async def test_a_list_grows_by_one_item_with_the_token_of_its_step(client: Client, model: Model) -> None:
    result, events = await run(client, model, blocks.list_each_step)
    assert_every_token_once(events, 6)
    steps = [step for output in outputs(events) for step in output.deltas]
    assert [type(delta) for delta in steps[0]] in ([Set], [Set, Set])
    for step in steps[1:]:
        appended = [delta for delta in step if isinstance(delta, Append)]
        assert len(appended) == 1
        assert appended[0].path == ("hidden",)
        assert len(appended[0].items) == 1
    hidden = result.saves["hidden"]
    assert len(hidden) == 6
    assert {(value.shape, value.dtype.name) for value in hidden} == {((256,), "bfloat16")}
    assert len({value.tobytes() for value in hidden}) == 6
    final = events[-1]
    assert isinstance(final, Final)
    assert final.status == "finished"
    assert final.usage.completion_tokens == 6


async def test_a_dict_with_nested_containers(client: Client, model: Model) -> None:
    result, events = await run(client, model, blocks.dict_each_step)
    prompt = result.usage.prompt_tokens
    saved = result.saves["by_step"]
    assert saved["shapes"] == {0: (prompt, 256), **dict.fromkeys(range(1, 6), (1, 256))}
    assert len(saved["norms"]) == 6
    assert saved["last"] == 5
    assert_every_token_once(events, 6)


async def test_a_scalar_overwritten_each_step_is_seen_each_step(client: Client, model: Model) -> None:
    result, events = await run(client, model, blocks.scalar_each_step)
    values = [
        delta.value
        for output in outputs(events)
        for step in output.deltas
        for delta in step
        if isinstance(delta, Set) and delta.path == ("value",)
    ]
    assert len(values) == 6
    assert len(set(values)) > 1
    assert result.saves["value"] == values[-1]
    assert float(result.saves["tensor"]) == pytest.approx(values[-1] - 1000.5, abs=1e-3)


async def test_logits_and_samples(client: Client, model: Model) -> None:
    result, _ = await run(client, model, blocks.logits_and_samples)
    assert result.saves["sampled"] == result.token_ids
    assert [int(top[0]) for top in result.saves["top"]] == result.token_ids


async def test_an_edit_in_place_changes_the_tokens(client: Client, model: Model) -> None:
    plain, _ = await run(client, model, None, max_tokens=12)
    same, _ = await run(client, model, blocks.edit_in_place(amount=1.0), max_tokens=12)
    other, _ = await run(client, model, blocks.edit_in_place(amount=-8.0), max_tokens=12)
    assert same.token_ids == plain.token_ids
    assert other.token_ids != plain.token_ids
    assert len(other.saves["norms"]) == 12


async def test_the_residual_stream_can_be_replaced(client: Client, model: Model) -> None:
    @tracewire.intervention
    def doubled(model, tracer, live, factor):
        before = model.residual(2).output.save()
        model.residual(2).output = factor * before
        after = model.residual(2).output.save()
        entering = model.model.layers[3].input_layernorm.output[1].clone().save()

    result, _ = await run(client, model, doubled(factor=2), max_tokens=1)
    before, after, entering = (result.saves[name].astype(np.float32) for name in ("before", "after", "entering"))
    # What the next layer's norm adds up is the replacement, to the bit.
    assert np.array_equal(after, 2 * before)
    assert np.array_equal(entering, after)


async def test_the_residual_stream_can_be_changed_in_place(client: Client, model: Model) -> None:
    @tracewire.intervention
    def assigned(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            model.residual(2).output += vector
            seen.append(model.residual(2).output[-1].clone())

    @tracewire.intervention
    def in_place(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            model.residual(2).output[:] += vector
            seen.append(model.residual(2).output[-1].clone())

    @tracewire.intervention
    def a_row(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            stream = model.residual(2).output
            for row in range(stream.shape[0]):
                part = stream[row]
                part += vector
            seen.append(model.residual(2).output[-1].clone())

    @tracewire.intervention
    def read_twice(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            model.residual(2).output[:] += vector.to(model.residual(2).output.dtype)
            seen.append(model.residual(2).output[-1].clone())

    @tracewire.intervention
    def in_two_parts(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            stream = model.residual(2).output
            stream[:, :100] += vector[:100]
            between = model.residual(2).output
            stream[:, 100:] += vector[100:]
            seen.append(model.residual(2).output[-1].clone())

    @tracewire.intervention
    def read_only(model, tracer, live, vector):
        seen = [].save()
        for step in tracer.iter[:]:
            scratch = model.residual(2).output.clone()
            scratch += vector
            seen.append(model.residual(2).output[-1].clone())

    vector = np.linspace(-4, 4, model.info.hidden_size, dtype=np.float32).astype(ml_dtypes.bfloat16)
    plain, _ = await run(client, model, None, max_tokens=8)
    same, _ = await run(client, model, read_only(vector=vector), max_tokens=8)
    assert same.token_ids == plain.token_ids
    known, _ = await run(client, model, assigned(vector=vector), max_tokens=8)
    assert known.token_ids != plain.token_ids
    for block in (in_place, a_row, read_twice, in_two_parts):
        result, _ = await run(client, model, block(vector=vector), max_tokens=8)
        assert result.token_ids == known.token_ids
        for one, other in zip(result.saves["seen"], known.saves["seen"], strict=True):
            assert np.array_equal(one, other)


async def test_two_readings_of_the_residual_stream_cannot_both_be_changed(client: Client, model: Model) -> None:
    @tracewire.intervention
    def both(model, tracer, live):
        one, other = model.residual(2).output, model.residual(2).output
        one[-1] += 1
        other[-1] += 1
        model.residual(3).output[-1].save()

    with pytest.raises(InterventionError, match="both readings were changed in place"):
        await run(client, model, both, max_tokens=4)


async def test_variables_helpers_modules_and_live_parameters(client: Client, model: Model) -> None:
    vector = np.arange(256, dtype=np.float32)
    block = blocks.uses_everything(vector=vector, names=["a", "b"], table={"x": 1})
    result, _ = await run(client, model, block, live={"alpha": 0.5}, max_tokens=2)
    out = result.saves["out"]
    assert out["dot"] == pytest.approx(float(out["scaled"] @ vector), rel=1e-3)
    assert (out["names"], out["table"], out["alpha"]) == (["A", "B"], {"x": 2}, 0.5)


async def test_what_is_changed_in_place_ends_right(client: Client, model: Model) -> None:
    result, events = await run(client, model, blocks.changed_in_place)
    final = events[-1]
    corrected = {delta.path[0] for _, _, deltas in final.deltas for delta in deltas}
    assert "total" in corrected
    assert result.saves["rows"][0][0] != 0.0


async def test_a_whole_prompt_arrives_once(client: Client, model: Model) -> None:
    result, events = await run(client, model, blocks.whole_prompt, prompt=list(range(1, 301)), max_tokens=3)
    assert result.saves["stream"].shape == (300, 256)
    carrying = [output.index for output in outputs(events) if any(output.deltas)]
    assert carrying == [0]


async def test_sixteen_different_traces_at_once_do_not_mix(client: Client, model: Model) -> None:
    results: dict[int, Any] = {}
    alone: dict[int, Any] = {}
    prompts = [f"def function_{n}(x, y=" + "1" * n + "):\n" for n in range(16)]

    async def one(n: int, into: dict[int, Any]) -> None:
        block = blocks.tagged(tag=f"trace {n}", layer=n % 8)
        into[n], events = await run(client, model, block, prompt=prompts[n], max_tokens=8 + n)
        assert_every_token_once(events, 8 + n)

    async with anyio.create_task_group() as group:
        for n in range(16):
            group.start_soon(one, n, results)
    for n in (0, 7, 15):
        await one(n, alone)
    for n, result in results.items():
        assert [entry[:2] for entry in result.saves["seen"]] == [[f"trace {n}", step] for step in range(8 + n)]
        assert len(result.token_ids) == 8 + n
    for n, result in alone.items():
        # Rounding differs with the batch; whose activation it is does not.
        ours = result.saves["seen"][0][2].astype(np.float32)
        theirs = [results[m].saves["seen"][0][2].astype(np.float32) for m in range(16)]
        nearest = min(range(16), key=lambda m: float(np.abs(theirs[m] - ours).max()))
        assert nearest == n


async def test_several_prompts_run_the_block_once_each(client: Client, model: Model) -> None:
    prompts = ["import os\n", "class A:\n    ", "The module provides"]
    block = blocks.list_each_step(layer=1)
    async with client.trace(model, prompts=prompts, block=block, **GREEDY, max_tokens=4) as trace:
        result = await trace.result()
    assert len(result.invokes) == 3
    for invoke in result.invokes:
        assert len(invoke.choices[0].saves["hidden"]) == 4
        assert len(invoke.choices[0].token_ids) == 4
    assert len({invoke.choices[0].saves["hidden"][0].tobytes() for invoke in result.invokes}) == 3


async def test_several_choices_have_saves_of_their_own(client: Client, model: Model) -> None:
    async with client.trace(
        model, PROMPT, blocks.logits_and_samples, n=3, temperature=1.0, seed=5, max_tokens=5, ignore_eos=True
    ) as trace:
        result = await trace.result()
    choices = result.invokes[0].choices
    assert len(choices) == 3
    for choice in choices:
        assert choice.saves["sampled"] == choice.token_ids
    assert len({tuple(choice.token_ids) for choice in choices}) > 1


async def test_three_consumers_fold_to_the_same_state(client: Client, model: Model, engine_bus: str) -> None:
    folds: dict[str, Fold] = {}

    async def consume(name: str, trace: str, names: set[str] | None = None) -> None:
        async with tracewire.connect(engine_bus) as other:
            fold = folds[name] = Fold(names=names)
            async for event in other.subscribe(trace, since="start", names=names):
                fold.apply(event)
            fold.verify()

    async with (
        client.trace(model, PROMPT, blocks.two_names, **GREEDY, max_tokens=40) as trace,
        anyio.create_task_group() as group,
    ):
        group.start_soon(consume, "from the start", trace.id)
        group.start_soon(consume, "one name", trace.id, {"first"})
        seen = 0
        async for output in trace:
            if isinstance(output, tracewire.Output):
                seen += len(output.token_ids)
            if seen >= 20 and "in the middle" not in folds:
                folds["in the middle"] = Fold()
                group.start_soon(consume, "in the middle", trace.id)
        result = await trace.result()
    await consume("after the end", trace.id)
    assert seen == 40
    for name, fold in folds.items():
        saves = fold.choices[0, 0].saves
        assert fold.choices[0, 0].token_ids == result.token_ids
        for key in saves:
            assert digest(saves[key]) == digest(result.saves[key]), (name, key)
    assert set(folds["one name"].choices[0, 0].saves) == {"first"}
    assert equal((await client.get_state(trace.id)).saves["first"], result.saves["first"])


async def test_a_consumer_that_leaves_harms_nobody(client: Client, model: Model, engine_bus: str) -> None:
    async with client.trace(model, PROMPT, blocks.list_each_step, **GREEDY, max_tokens=30) as trace:
        async with tracewire.connect(engine_bus) as other:
            subscription = other.subscribe(trace.id)
            async for event in subscription:
                if isinstance(event, Output):
                    break
            await subscription.aclose()
        result = await trace.result()
    assert len(result.saves["hidden"]) == 30


async def test_resuming_after_an_event_id_gets_the_rest(client: Client, model: Model) -> None:
    async with client.trace(model, PROMPT, blocks.two_names, **GREEDY, max_tokens=8) as trace:
        await trace.result()
    every = await events_of(client, trace.id)
    # On a busy machine outputs share entries.
    for cut in (0, len(every) // 2 - 1, len(every) - 2):
        event = every[cut]
        rest = await events_of(client, trace.id, since=f"{event.attempt}-{event.seq}")
        assert [later.seq for later in rest] == [later.seq for later in every[cut + 1 :]]


async def test_a_trace_without_a_block_is_a_plain_request(client: Client, model: Model) -> None:
    result, events = await run(client, model, None, logprobs=2)
    assert len(result.token_ids) == 6
    assert all(output.logprobs and len(output.logprobs[0]) >= 2 for output in outputs(events))


async def test_chat_messages_and_token_ids(client: Client, model: Model) -> None:
    chat, _ = await run(client, model, None, prompt=[{"role": "user", "content": "sort a list"}])
    assert len(chat.token_ids) == 6
    ids, _ = await run(client, model, None, prompt=[5, 6, 7])
    assert ids.usage.prompt_tokens == 3


async def test_stop_strings_end_the_saves_with_the_text(client: Client, model: Model) -> None:
    free, _ = await run(client, model, blocks.two_names, max_tokens=20)
    stop = free.text.split()[2]
    result, events = await run(client, model, blocks.two_names, max_tokens=20, stop=[stop])
    assert stop not in result.text
    assert len(result.token_ids) < 20
    assert_every_token_once(events, len(result.token_ids))
    # vLLM finds a stop string after the step that completed it, and may have begun another.
    streamed = sum(len(step) > 0 for output in outputs(events) for step in output.deltas)
    assert streamed == len(result.saves["first"]) == len(result.token_ids)


async def test_tracer_stop_ends_at_that_token(client: Client, model: Model) -> None:
    plain, _ = await run(client, model, None, max_tokens=20)
    result, events = await run(client, model, blocks.stops_at(at=4), max_tokens=20)
    assert result.status == "stopped"
    assert result.token_ids == plain.token_ids[:5]
    assert plain.text.startswith(result.text)
    assert len(result.saves["seen"]) == 5
    assert_every_token_once(events, 5)


async def test_small_integers_saved_by_one_trace_are_not_saves_of_another(client: Client, model: Model) -> None:
    results: dict[bool, Any] = {}

    async def one(save: bool) -> None:
        results[save], _ = await run(client, model, blocks.small_numbers(save=save), max_tokens=12)

    async with anyio.create_task_group() as group:
        group.start_soon(one, True)
        group.start_soon(one, False)
    assert results[True].saves["count"] == 1
    assert results[False].saves == {}
