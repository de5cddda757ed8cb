"""Sampling params beside a block: each does what it does without one, and every token has its save."""

# mypy: ignore-errors

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest

import tracewire
from tests.support.blocks import tracing as blocks
from tracewire import Client, Model, Output, TraceRejected

PROMPT = "def add(a, b):\n    return"


@tracewire.intervention
def watch(model, tracer, live):
    """What is sampled, from which logits, step by step."""
    sampled = [].save()
    best = [].save()
    for step in tracer.iter[:]:
        model.residual(3).output[-1]
        best.append(int(model.logits[0].argmax()))
        sampled.append(int(model.samples))


async def run(client: Client, model: Model, block: Any = watch, **options: Any) -> tuple[Any, list[Output]]:
    """A trace's result, and its outputs."""
    options = {"temperature": 0.0, "max_tokens": 12, **options}
    async with client.trace(model, PROMPT, block, **options) as trace:
        outputs = [item async for item in trace if isinstance(item, Output)]
        return await trace.result(), outputs


def assert_each_token_saved(result: Any) -> None:
    """Every choice has one save for each of its tokens, and no token is lost."""
    for invoke in result.invokes:
        for choice in invoke.choices:
            assert choice.saves["sampled"] == choice.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_several_choices(client: Client, model: Model, temperature: float) -> None:
    options = {"n": 3, "seed": 5, "temperature": temperature, "ignore_eos": True}
    if not temperature:
        with pytest.raises(TraceRejected, match="n must be 1") as caught:
            await run(client, model, **options)
        assert caught.value.field == "sampling.n"
        return
    result, _ = await run(client, model, **options)
    plain, _ = await run(client, model, None, **options)
    choices = result.invokes[0].choices
    assert [choice.token_ids for choice in choices] == [choice.token_ids for choice in plain.invokes[0].choices]
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    assert_each_token_saved(result)


async def test_a_choice_that_stops_leaves_the_others_alone(client: Client, model: Model) -> None:
    @tracewire.intervention
    def some_stop(model, tracer, live, first):
        sampled = [].save()
        for step in tracer.iter[:]:
            sampled.append(int(model.samples))
            if step == 3 and sampled[0] in first:
                tracer.stop()

    options = {"n": 8, "seed": 11, "temperature": 2.0, "ignore_eos": True, "max_tokens": 10}
    plain, _ = await run(client, model, None, **options)
    drawn = [choice.token_ids[0] for choice in plain.invokes[0].choices]
    first = {drawn[0]}
    assert first != {*drawn}
    result, _ = await run(client, model, some_stop(first=sorted(first)), **options)
    lengths = {len(choice.token_ids) for choice in result.invokes[0].choices}
    for choice in result.invokes[0].choices:
        assert len(choice.token_ids) == (4 if choice.token_ids[0] in first else 10)
        assert choice.saves["sampled"] == choice.token_ids
    assert lengths == {4, 10}


async def test_stop_strings(client: Client, model: Model) -> None:
    plain, _ = await run(client, model, None, max_tokens=30, ignore_eos=True)
    # Within the text, over the end of a token.
    stop = plain.text[12:15]
    end = plain.text.index(stop)
    for include in (False, True):
        result, outputs = await run(
            client, model, max_tokens=30, ignore_eos=True, stop=[stop], include_stop_str_in_output=include
        )
        text = plain.text[: end + len(stop) * include]
        assert result.text == "".join(output.text for output in outputs) == text
        choice = result.invokes[0].choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        # A stop string is found by vLLM's frontend: the engine is some steps further by then.
        sampled = choice.saves["sampled"]
        assert choice.token_ids == plain.token_ids[: len(choice.token_ids)]
        assert sampled == plain.token_ids[: len(sampled)]
        assert len(sampled) >= len(choice.token_ids)


async def test_stop_tokens_and_the_end_of_a_sequence(client: Client, model: Model) -> None:
    plain, _ = await run(client, model, None, ignore_eos=True)
    last = plain.token_ids[5]
    place = plain.token_ids.index(last)
    result, _ = await run(client, model, stop_token_ids=[last], ignore_eos=True)
    assert result.token_ids == plain.token_ids[: place + 1]
    assert result.invokes[0].choices[0].stop_reason == last
    assert result.saves["sampled"] == result.token_ids
    # Until there are enough, it goes on.
    longer, _ = await run(client, model, stop_token_ids=[last], ignore_eos=True, min_tokens=place + 3)
    assert len(longer.token_ids) >= place + 3
    assert longer.saves["sampled"] == longer.token_ids


async def test_logprobs(client: Client, model: Model) -> None:
    result, outputs = await run(client, model, logprobs=3, ignore_eos=True)
    plain, expected = await run(client, model, None, logprobs=3, ignore_eos=True)

    def flat(outputs: list[Output]) -> list[dict[int, Any]]:
        return [entry for output in outputs for entry in output.logprobs]

    assert result.token_ids == plain.token_ids
    ours, theirs = flat(outputs), flat(expected)
    assert len(ours) == len(theirs) == len(result.token_ids)
    for token, entry, other in zip(result.token_ids, ours, theirs, strict=True):
        assert entry.keys() == other.keys()
        assert entry[token][1] == 1
        assert entry[token][0] == max(value[0] for value in entry.values())
        assert all(math.isclose(entry[key][0], other[key][0], abs_tol=0.05) for key in entry)
    assert_each_token_saved(result)


async def test_prompt_logprobs(client: Client, model: Model) -> None:
    result, _ = await run(client, model, prompt_logprobs=2, ignore_eos=True, max_tokens=4)
    plain, _ = await run(client, model, None, prompt_logprobs=2, ignore_eos=True, max_tokens=4)
    (ours,), (theirs,) = result.prompt_logprobs, plain.prompt_logprobs
    assert len(ours) == result.usage.prompt_tokens
    assert ours[0] == theirs[0] == {}
    for entry, other in zip(ours[1:], theirs[1:], strict=True):
        assert entry.keys() == other.keys()
        assert all(math.isclose(entry[key][0], other[key][0], abs_tol=0.05) for key in entry)
    none, _ = await run(client, model, max_tokens=2)
    assert none.prompt_logprobs == []


async def test_structured_json(client: Client, model: Model) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["add", "sub"]}, "arity": {"enum": [1, 2]}},
        "required": ["name", "arity"],
        "additionalProperties": False,
    }
    result, _ = await run(client, model, structured_outputs={"json": schema}, max_tokens=60)
    value = json.loads(result.text)
    assert value["name"] in ("add", "sub")
    assert value["arity"] in (1, 2)
    assert_each_token_saved(result)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ({"regex": "[a-c]{3}[0-9]{2}"}, "[a-c]{3}[0-9]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ],
    ids=["regex", "choice", "grammar"],
)
async def test_structured_text(client: Client, model: Model, kind: dict[str, Any], wanted: str) -> None:
    result, _ = await run(client, model, structured_outputs=kind, max_tokens=30)
    assert re.fullmatch(wanted, result.text)
    assert_each_token_saved(result)

    # What a block makes of the logits is bound by it as well.
    @tracewire.intervention
    def pushes(model, tracer, live):
        for step in tracer.iter[:]:
            model.logits[:, 5:300] += 20.0

    pushed, _ = await run(client, model, pushes, structured_outputs=kind, max_tokens=30)
    assert re.fullmatch(wanted, pushed.text)


async def test_a_grammar_that_is_none_is_refused(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected) as caught:
        await run(client, model, structured_outputs={"regex": "(("})
    assert caught.value.field.startswith("sampling.structured_outputs")
    with pytest.raises(TraceRejected) as caught:
        await run(client, model, structured_outputs={"regexp": "a"})
    assert caught.value.field.startswith("sampling.structured_outputs")


async def test_banned_preferred_and_allowed_tokens(client: Client, model: Model) -> None:
    plain, _ = await run(client, model, None, ignore_eos=True)
    first = plain.token_ids[0]
    biased, _ = await run(client, model, ignore_eos=True, logit_bias={first: -100.0})
    assert first not in biased.token_ids
    assert_each_token_saved(biased)
    # A block sees the logits as the model gives them.
    assert biased.saves["best"][0] == first
    wanted, _ = await run(client, model, ignore_eos=True, logit_bias={77: 100.0})
    assert wanted.token_ids == [77] * 12
    few, _ = await run(client, model, ignore_eos=True, allowed_token_ids=[40, 41, 42])
    assert set(few.token_ids) <= {40, 41, 42}
    assert_each_token_saved(few)
    word = plain.text[:8].split()[0]
    without, _ = await run(client, model, ignore_eos=True, bad_words=[word], max_tokens=20)
    assert word not in without.text.split()
    assert_each_token_saved(without)


async def test_penalties_and_nuclei(client: Client, model: Model) -> None:
    for options in (
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3},
    ):
        result, _ = await run(client, model, ignore_eos=True, **options)
        plain, _ = await run(client, model, None, ignore_eos=True, **options)
        assert result.token_ids == plain.token_ids
        assert_each_token_saved(result)


async def test_a_seed_samples_the_same(client: Client, model: Model) -> None:
    options = {"temperature": 1.0, "ignore_eos": True}
    one, _ = await run(client, model, seed=7, **options)
    same, _ = await run(client, model, seed=7, **options)
    other, _ = await run(client, model, seed=8, **options)
    assert one.token_ids == same.token_ids != other.token_ids


async def test_without_text(client: Client, model: Model) -> None:
    result, _ = await run(client, model, detokenize=False, ignore_eos=True)
    assert result.text == ""
    assert len(result.token_ids) == 12
    assert_each_token_saved(result)
    stopped, _ = await run(client, model, blocks.stops_at(at=2), detokenize=False, ignore_eos=True)
    assert (stopped.text, len(stopped.token_ids)) == ("", 3)


async def test_special_tokens_in_the_text(client: Client, model: Model) -> None:
    options = {"logit_bias": {0: 100.0}, "ignore_eos": True, "max_tokens": 3, "skip_special_tokens": False}
    result, _ = await run(client, model, **options)
    plain, _ = await run(client, model, None, **options)
    assert result.token_ids == [0, 0, 0]
    assert result.text == plain.text != ""


async def test_a_stop_before_min_tokens(client: Client, model: Model) -> None:
    """nnsight forces an end of sequence, which waits for them; here the request is over at that token."""
    result, _ = await run(client, model, blocks.stops_at(at=1), min_tokens=8)
    assert len(result.token_ids) == 2
    assert result.status == "stopped"


async def test_logits_and_samples_can_be_written(client: Client, model: Model) -> None:
    @tracewire.intervention
    def forces(model, tracer, live):
        after = [].save()
        for step in tracer.iter[:]:
            model.samples[:] = 100 + step
            after.append(int(model.samples))

    @tracewire.intervention
    def pushes(model, tracer, live):
        for step in tracer.iter[:]:
            model.logits[:, 200 + step] = 1e4

    forced, _ = await run(client, model, forces, max_tokens=4, ignore_eos=True)
    assert forced.token_ids == forced.saves["after"] == [100, 101, 102, 103]
    pushed, _ = await run(client, model, pushes, max_tokens=4, temperature=0.5, seed=0, ignore_eos=True)
    assert pushed.token_ids == [200, 201, 202, 203]


async def test_saved_logits_are_not_what_the_sampler_made_of_them(client: Client, model: Model) -> None:
    @tracewire.intervention
    def both(model, tracer, live):
        logits = model.logits.save()
        copy = model.logits.clone().save()

    result, _ = await run(client, model, both, max_tokens=1, temperature=0.5, seed=0)
    assert np.array_equal(result.saves["logits"], result.saves["copy"])


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"extra_sampling": {"temperatur": 0.5}}, "sampling.temperatur", "did you mean 'temperature'"),
        ({"top_p": 2.0}, "sampling.top_p", "top_p"),
        ({"extra_sampling": {"output_kind": 1}}, "sampling.output_kind", "engine's own"),
        ({"extra_sampling": {"stream_interval": 4}}, "sampling.stream_interval", "engine's own"),
        ({"extra_sampling": {"flat_logprobs": True}}, "sampling.flat_logprobs", "engine's own"),
        ({"logprobs": 10_000}, "sampling.logprobs", "logprobs"),
        ({"allowed_token_ids": [10**6]}, "sampling.allowed_token_ids", "allowed_token_ids"),
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias", "logit_bias"),
        ({"stop": ["a"], "detokenize": False}, "sampling.detokenize", "detokenize"),
        ({"min_tokens": 20, "max_tokens": 10}, "sampling.max_tokens", "min_tokens"),
        ({"max_tokens": 0}, "sampling.max_tokens", "max_tokens"),
    ],
)
async def test_what_cannot_be_is_refused(
    client: Client, model: Model, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(TraceRejected, match=message) as caught:
        await run(client, model, **options)
    assert caught.value.field == field
