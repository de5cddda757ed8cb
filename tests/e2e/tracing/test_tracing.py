"""What nnsight's own tests of tracing ask of vLLM, asked of Tracewire's engine, in `@intervention` blocks.

Each test is named for what nnsight's has in its place; see `docs/nnsight.md`.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch

import tracewire
from tests.support.blocks import tracing as blocks
from tracewire import Client, InterventionError, Model, Output, Prompt, TraceFailed, TraceRejected, UnknownModulePath
from tracewire_bus.bus import Bus
from tracewire_bus.wire.messages import Block, Invoke, Submission

PROMPT = "def add(a, b):\n    return"
OTHER = "import os\nimport sys\n\nclass Path"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


async def run(client: Client, model: Model, block: Any = None, prompt: Any = PROMPT, **options: Any) -> Any:
    async with client.trace(model, prompt, block, **{**GREEDY, "max_tokens": 1, **options}) as trace:
        return await trace.result()


async def invokes(client: Client, model: Model, block: Any, prompts: list[Any], **options: Any) -> list[Any]:
    """The only choice of each prompt of one trace."""
    async with client.trace(model, prompts=prompts, block=block, **{**GREEDY, "max_tokens": 1, **options}) as trace:
        return [invoke.choices[0] for invoke in (await trace.result()).invokes]


@pytest.fixture(autouse=True)
async def unharmed(client: Client, model: Model) -> Any:
    """Whatever a test did, the engine answers as ever."""
    yield
    result = await run(client, model, blocks.logits_and_samples, max_tokens=3)
    assert result.saves["sampled"] == result.token_ids == (await run(client, model, max_tokens=3)).token_ids


# --- logits, samples --------------------------------------------------------------------------------------------------


@tracewire.intervention
def logits_once(model, tracer, live):
    logits = model.logits.save()
    samples = model.samples.save()


async def test_single_logit(client: Client, model: Model) -> None:
    result = await run(client, model, logits_once)
    assert result.saves["logits"].shape == (1, model.info.vocabulary)
    assert int(result.saves["logits"].argmax()) == int(result.saves["samples"].item()) == result.token_ids[0]


async def test_logits_edit_changes_prediction(client: Client, model: Model) -> None:
    @tracewire.intervention
    def zeroed(model, tracer, live):
        model.logits = torch.zeros_like(model.logits)
        logits = model.logits.save()

    result = await run(client, model, zeroed)
    assert not np.asarray(result.saves["logits"], np.float32).any()
    assert result.token_ids != (await run(client, model)).token_ids


async def test_a_save_ships_only_its_own_rows(client: Client, model: Model) -> None:
    @tracewire.intervention
    def both(model, tracer, live):
        hidden = model.model.layers[3].output[0].save()
        logits = model.logits.save()

    choices = await invokes(client, model, both, [f"# number {number} of" + " it" * number for number in range(4)])
    lengths = [choice.saves["hidden"].shape[0] for choice in choices]
    assert len(set(lengths)) == 4
    for choice in choices:
        assert choice.saves["hidden"].nbytes == choice.saves["hidden"].size * 2
        assert choice.saves["logits"].shape == (1, model.info.vocabulary)


async def test_samples_edit_replaces_the_drawn_id(client: Client, model: Model) -> None:
    @tracewire.intervention
    def forced(model, tracer, live, token):
        greedy = int(model.logits.argmax(dim=-1))
        model.samples = torch.full_like(model.samples, token)
        greedy = greedy.save()
        after = int(model.samples).save()

    result = await run(client, model, forced(token=1234))
    assert result.saves["greedy"] != 1234
    assert result.saves["after"] == 1234
    assert result.token_ids == [1234]


# --- generation -------------------------------------------------------------------------------------------------------


async def test_max_token_count_and_all(client: Client, model: Model) -> None:
    @tracewire.intervention
    def every(model, tracer, live):
        logits = [].save()
        for _ in tracer.all():
            logits.append(model.logits)

    assert len((await run(client, model, every, max_tokens=10)).saves["logits"]) == 10


async def test_state_carries_from_step_to_step(client: Client, model: Model) -> None:
    @tracewire.intervention
    def flagged(model, tracer, live):
        seen = [].save()
        flag = False
        for step in tracer.iter[:]:
            if flag:
                model.model.layers[6].output[0][:] *= 0
            seen.append(flag)
            flag = step == 1 or flag

    result = await run(client, model, flagged, max_tokens=5)
    plain = await run(client, model, max_tokens=5)
    assert result.saves["seen"] == [False, False, True, True, True]
    assert result.token_ids[:2] == plain.token_ids[:2]


async def test_max_new_tokens_is_refused_with_vllm_s_name(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match=r"max_new_tokens.*did you mean 'max_tokens'"):
        await run(client, model, logits_once, max_new_tokens=3)


# --- interventions ----------------------------------------------------------------------------------------------------


@tracewire.intervention
def reads_all(model, tracer, live):
    entering = model.model.layers[5].inputs[0][1].clone().save()
    positions = model.model.layers[5].input.clone().save()
    inner = model.model.layers[5].mlp.output.clone().save()
    whole = model.residual(5).output.save()


async def test_activations_span_the_prompt(client: Client, model: Model) -> None:
    result = await run(client, model, reads_all)
    count = result.usage.prompt_tokens
    for name in ("entering", "inner", "whole"):
        assert result.saves[name].shape == (count, model.info.hidden_size)
    # vLLM's layers take the positions first.
    assert list(result.saves["positions"]) == list(range(count))


async def test_zero_activation_swap_and_clone_edit(client: Client, model: Model) -> None:
    @tracewire.intervention
    def swapped(model, tracer, live):
        model.model.layers[-2].mlp.output = torch.zeros_like(model.model.layers[-2].mlp.output)
        after = model.model.layers[-2].mlp.output.clone().save()
        logits = model.logits.save()

    @tracewire.intervention
    def cloned(model, tracer, live):
        out = model.model.layers[-2].mlp.output.clone()
        out[:] = 0
        model.model.layers[-2].mlp.output = out
        after = model.model.layers[-2].mlp.output.clone().save()
        logits = model.logits.save()

    plain = await run(client, model, logits_once)
    one, two = await run(client, model, swapped), await run(client, model, cloned)
    for result in (one, two):
        assert not np.asarray(result.saves["after"], np.float32).any()
        assert not np.array_equal(result.saves["logits"], plain.saves["logits"])
    assert np.array_equal(one.saves["logits"], two.saves["logits"])


async def test_edit_module_input(client: Client, model: Model) -> None:
    @tracewire.intervention
    def zeroed(model, tracer, live):
        model.model.layers[5].mlp.input = torch.zeros_like(model.model.layers[5].mlp.input)
        inner = model.model.layers[5].mlp.output.clone().save()
        logits = model.logits.save()

    result = await run(client, model, zeroed)
    assert not np.asarray(result.saves["inner"], np.float32).any()
    assert not np.array_equal(result.saves["logits"], (await run(client, model, logits_once)).saves["logits"])


async def test_the_inputs_of_a_layer(client: Client, model: Model) -> None:
    @tracewire.intervention
    def doubled(model, tracer, live):
        args, kwargs = model.model.layers[3].inputs
        before = args[1].clone().save()
        model.model.layers[3].inputs = ((args[0], args[1] * 2, args[2]), kwargs)
        after = model.model.layers[3].inputs[0][1].clone().save()

    result = await run(client, model, doubled)
    assert np.array_equal(result.saves["after"], 2 * result.saves["before"])


async def test_multi_layer_intervention(client: Client, model: Model) -> None:
    @tracewire.intervention
    def two(model, tracer, live, factor):
        model.residual(2).output *= factor
        later = model.residual(6).output.save()
        logits = model.logits.save()

    plain, edited = [await run(client, model, two(factor=factor)) for factor in (1, -3)]
    assert not np.array_equal(plain.saves["later"], edited.saves["later"])
    assert not np.array_equal(plain.saves["logits"], edited.saves["logits"])


async def test_edit_at_one_generation_step(client: Client, model: Model) -> None:
    @tracewire.intervention
    def third(model, tracer, live):
        zeroed = [].save()
        for step in tracer.iter[:]:
            if step == 2:
                model.model.layers[4].mlp.output = torch.zeros_like(model.model.layers[4].mlp.output)
            zeroed.append(not bool(model.model.layers[4].mlp.output.any()))

    result = await run(client, model, third, max_tokens=5)
    assert result.saves["zeroed"] == [False, False, True, False, False]


async def test_a_donor_of_another_trace_is_patched_in(client: Client, model: Model) -> None:
    @tracewire.intervention
    def taken(model, tracer, live):
        donor = model.residual(3).output.save()

    @tracewire.intervention
    def patched(model, tracer, live, donor):
        stream = model.residual(3).output
        stream[-1] = torch.as_tensor(donor).to(stream)[-1]
        model.residual(3).output = stream
        after = model.residual(3).output.save()
        logits = model.logits.save()

    donor = (await run(client, model, taken, OTHER)).saves["donor"]
    result = await run(client, model, patched(donor=donor))
    assert np.array_equal(result.saves["after"][-1], donor[-1])


async def test_modules_called_ad_hoc(client: Client, model: Model) -> None:
    """A logit lens through the model's own logits path."""

    @tracewire.intervention
    def lens(model, tracer, live):
        tops = [].save()
        for step in tracer.iter[:]:
            stream = model.residual(7).output[-1:]
            tops.append(int(model.logits_processor(model.lm_head, model.model.norm(stream)).argmax(-1)))

    result = await run(client, model, lens, max_tokens=4)
    assert result.saves["tops"] == result.token_ids


async def test_operations_inside_a_forward(client: Client, model: Model) -> None:
    @tracewire.intervention
    def sourced(model, tracer, live):
        names = list(model.model.layers[2].mlp.source.names).save()
        gated = model.model.layers[2].mlp.source.self_down_proj_0.input.clone().save()
        inner = model.model.layers[2].mlp.down_proj.input.clone().save()

    result = await run(client, model, sourced)
    assert "self_down_proj_0" in result.saves["names"]
    assert np.array_equal(result.saves["gated"], result.saves["inner"])


async def test_weights_can_be_read(client: Client, model: Model) -> None:
    @tracewire.intervention
    def weight(model, tracer, live):
        gain = model.model.norm.weight.clone().save()
        model.logits

    assert (await run(client, model, weight)).saves["gain"].shape == (model.info.hidden_size,)


# --- skip -------------------------------------------------------------------------------------------------------------


@tracewire.intervention
def skips(model, tracer, live, layer):
    for step in tracer.iter[:]:
        model.model.layers[layer].mlp.skip(torch.zeros_like(model.model.layers[layer].mlp.input))


@tracewire.intervention
def zeroes(model, tracer, live, layer):
    for step in tracer.iter[:]:
        model.model.layers[layer].mlp.output[:] = 0


async def test_a_module_is_skipped_whoever_shares_the_batch(client: Client, model: Model) -> None:
    """nnsight's engine dies of this when anything else is in the batch."""
    expected = await run(client, model, zeroes(layer=1), max_tokens=12)
    plain = await run(client, model, max_tokens=12)
    assert expected.token_ids != plain.token_ids
    assert (await run(client, model, skips(layer=1), max_tokens=12)).token_ids == expected.token_ids
    results: dict[str, Any] = {}

    async def one(name: str, block: Any) -> None:
        results[name] = await run(client, model, block, max_tokens=12)

    async with anyio.create_task_group() as group:
        for name, block in {"skip": skips(layer=1), "zero": zeroes(layer=1), "plain": None, "more": None}.items():
            group.start_soon(one, name, block)
    assert results["skip"].token_ids == results["zero"].token_ids == expected.token_ids
    assert results["plain"].token_ids == results["more"].token_ids == plain.token_ids


async def test_what_stands_for_a_skipped_output_is_seen(client: Client, model: Model) -> None:
    @tracewire.intervention
    def seen(model, tracer, live):
        entering = model.model.layers[3].mlp.input
        model.model.layers[3].mlp.skip(entering * 2)
        twice = (2 * entering).clone().save()
        after = model.model.layers[3].mlp.output.clone().save()

    result = await run(client, model, seen)
    assert np.array_equal(result.saves["twice"], result.saves["after"])


# --- replacements that do not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "model.model.layers[2].mlp.output = model.model.layers[2].mlp.output[:1]",
        "model.model.layers[2].mlp.output = model.model.layers[2].mlp.output[:, :7]",
        "model.model.layers[2].mlp.output = 3",
        "model.model.layers[2].output = model.model.layers[2].output[0]",
        "model.model.layers[2].output = (model.model.layers[2].output[0],)",
        "model.model.layers[2].mlp.skip(model.model.layers[2].mlp.input[:2, :3])",
        "model.model.layers[2].mlp.skip('nothing')",
        "model.logits = model.logits[:, :10]",
        "model.samples = model.samples.new_zeros(7)",
        "model.samples = model.samples + 0.5",
        "model.model.layers[2].inputs = ((), {})",
    ],
)
async def test_a_replacement_of_another_shape_ends_its_own_trace(client: Client, model: Model, source: str) -> None:
    """Beside others, which it leaves alone."""
    plain = await run(client, model, max_tokens=20)
    together: list[Any] = []
    block = Block(name="written", source=source, filename="user.py", first_line=1)
    finals: list[Any] = []

    async def beside() -> None:
        together.append(await run(client, model, max_tokens=20))

    async def bad() -> None:
        async with Bus.open(client.url) as bus:
            name = f"unfit-{abs(hash(source))}"
            sampling = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
            await bus.submit(
                Submission(trace=name, model="demo", invokes=[Invoke(prompt=PROMPT, sampling=sampling)], block=block)
            )
            finals.extend([event async for event in client.subscribe(name)][-1:])

    async with anyio.create_task_group() as group:
        group.start_soon(beside)
        group.start_soon(bad)
    assert together[0].token_ids == plain.token_ids
    assert finals[0].status == "failed"
    assert finals[0].error.type == "ValueError"
    # What stands for a module's output is looked at when the module has run, and the block is elsewhere by then.
    assert "skip" in source or finals[0].error.line == 1


@pytest.mark.parametrize(
    "lines",
    [
        ["model.samples = model.samples + 10**6"],
        ["model.samples[:] = 10**6"],
        ["model.samples[:] = -1"],
        ["model.samples = model.samples.long() + 2**40"],
        ["kept = model.samples", "kept[:] = 10**6", "logits = model.logits"],
        ["for step in tracer.iter[:]:", "    drawn = model.samples", "    drawn.fill_(-2 if step else 5)"],
    ],
)
async def test_a_sample_outside_of_the_vocabulary_ends_its_own_trace(
    client: Client, model: Model, lines: list[str]
) -> None:
    """At the line that asked for the samples, beside others, which it leaves alone."""
    plain = await run(client, model, max_tokens=20)
    block = Block(name="written", source="\n".join(["first = model.logits", *lines]), filename="user.py", first_line=1)
    finals: list[Any] = []
    async with client.trace(model, PROMPT, max_tokens=20, **GREEDY) as beside:
        await beside.__anext__()
        async with Bus.open(client.url) as bus:
            name = f"outside-{abs(hash(tuple(lines)))}"
            sampling = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
            await bus.submit(
                Submission(trace=name, model="demo", invokes=[Invoke(prompt=PROMPT, sampling=sampling)], block=block)
            )
            finals.extend([event async for event in client.subscribe(name)][-1:])
        assert (await beside.result()).token_ids == plain.token_ids
    error = finals[0].error
    assert finals[0].status == "failed"
    assert error.type == "NotInVocabulary"
    assert f"0 to {model.info.vocabulary - 1}" in error.message
    where = next(number for number, line in enumerate(lines, 2) if "model.samples" in line)
    assert (error.filename, error.line) == ("user.py", where)


async def test_samples_that_a_block_kept_are_not_what_the_model_goes_on_with(client: Client, model: Model) -> None:
    @tracewire.intervention
    def keeping(model, tracer, live):
        kept = []
        for _ in tracer.iter[:]:
            logits = model.logits
            for earlier in kept:
                earlier[:] = 10**6
            kept.append(model.samples)

    plain = await run(client, model, max_tokens=6)
    assert (await run(client, model, keeping, max_tokens=6)).token_ids == plain.token_ids


async def test_a_replacement_of_another_dtype_is_converted(client: Client, model: Model) -> None:
    @tracewire.intervention
    def widened(model, tracer, live):
        model.model.layers[2].mlp.output = model.model.layers[2].mlp.output.double() * 2
        after = model.model.layers[2].mlp.output.clone().save()

    assert (await run(client, model, widened)).saves["after"].dtype.name == "bfloat16"


# --- prompts ----------------------------------------------------------------------------------------------------------


async def test_token_ids_and_text_are_the_same_prompt(client: Client, model: Model) -> None:
    text = await run(client, model, logits_once)
    # What the tokenizer makes of it, found by reading one of the shorter ones.
    accepted = text.accepted.prompt_tokens
    assert accepted == [text.usage.prompt_tokens]
    ids = [(7 * place) % 4000 + 1 for place in range(12)]
    assert (await run(client, model, reads_all, ids)).saves["whole"].shape[0] == 12
    assert (await run(client, model, reads_all, np.array(ids))).saves["whole"].shape[0] == 12


async def test_mixed_forms_in_one_trace(client: Client, model: Model) -> None:
    ids = [5, 6, 7]
    chat = [{"role": "user", "content": "a"}]
    first, second, third = await invokes(client, model, reads_all, [PROMPT, ids, chat])
    assert second.saves["whole"].shape[0] == 3
    assert first.saves["whole"].shape[0] > 3
    assert third.saves["whole"].shape[0] > 0


async def test_a_tokenizer_s_output_and_vllm_s_prompts(client: Client, model: Model) -> None:
    ids = [(7 * place) % 4000 + 1 for place in range(6)]
    tokenized = {"input_ids": np.array([ids]), "attention_mask": [[0, 1, 1, 1, 1, 1]]}
    wanted = (await run(client, model, reads_all, ids[1:])).saves["whole"]
    for prompt in (tokenized, {"input_ids": ids[1:]}, {"prompt_token_ids": ids[1:]}):
        assert np.array_equal((await run(client, model, reads_all, prompt)).saves["whole"], wanted)
    with pytest.raises(TraceRejected, match="expected text, token ids"):
        await run(client, model, logits_once, {"pixels": [1]})


async def test_media_are_refused(client: Client, model: Model) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(TraceRejected, match="media are not taken") as caught:
        await run(client, model, logits_once, [{"role": "user", "content": parts}])
    assert caught.value.field == "prompt[0].content[1]"


@pytest.mark.parametrize("name", ["scan", "session", "vllm_entrypoint", "collective_rpc"])
async def test_what_is_the_engine_s_operator_s_is_not_there(client: Client, model: Model, name: str) -> None:
    with pytest.raises(UnknownModulePath, match=name):
        await run(client, model, Block(name="asks", source=f"model.{name}('x')"))


async def test_gradients_are_an_error(client: Client, model: Model) -> None:
    @tracewire.intervention
    def differentiates(model, tracer, live):
        stream = model.residual(2).output
        model.logits.sum().backward()

    with pytest.raises(InterventionError) as caught:
        await run(client, model, differentiates)
    assert caught.value.source == "model.logits.sum().backward()"


async def test_remote_is_refused(client: Client, model: Model) -> None:
    with pytest.raises(tracewire.UnknownOption) as caught:
        await run(client, model, logits_once, remote=True)
    assert caught.value.field == "remote"


async def test_prompts_without_any_are_refused(client: Client, model: Model) -> None:
    with pytest.raises(TraceRejected, match="at least one prompt"):
        await invokes(client, model, logits_once, [])


async def test_sampling_of_a_prompt_s_own(client: Client, model: Model) -> None:
    # vLLM's default of 16 tokens, asked for by name against the trace's 4.
    prompts = [Prompt(PROMPT, max_tokens=16), Prompt(OTHER, max_tokens=3), OTHER]
    choices = await invokes(client, model, blocks.logits_and_samples, prompts, max_tokens=4)
    assert [len(choice.token_ids) for choice in choices] == [16, 3, 4]
    assert [len(choice.saves["sampled"]) for choice in choices] == [16, 3, 4]
    warm = [Prompt(PROMPT, temperature=1.0, seed=seed) for seed in range(3)]
    drawn = await invokes(client, model, blocks.logits_and_samples, [*warm, PROMPT, PROMPT], max_tokens=8)
    assert len({tuple(choice.token_ids) for choice in drawn}) >= 3
    assert drawn[3].token_ids == drawn[4].token_ids


# --- requests side by side --------------------------------------------------------------------------------------------


async def test_an_intervention_on_one_of_several(client: Client, model: Model) -> None:
    results: dict[str, Any] = {}

    async def one(name: str, block: Any) -> None:
        results[name] = await run(client, model, block, max_tokens=8)

    async with anyio.create_task_group() as group:
        group.start_soon(one, "clean", blocks.logits_and_samples)
        group.start_soon(one, "corrupted", zeroes(layer=1))
    assert results["clean"].token_ids == (await run(client, model, max_tokens=8)).token_ids
    assert results["clean"].token_ids != results["corrupted"].token_ids


async def test_identical_prompts_do_not_collide(client: Client, model: Model) -> None:
    first, second = await invokes(client, model, blocks.list_each_step(layer=2), [PROMPT, PROMPT], max_tokens=5)
    assert first.token_ids == second.token_ids
    assert len(first.saves["hidden"]) == len(second.saves["hidden"]) == 5


async def test_the_sequences_of_one_prompt_diverge_where_they_should(client: Client, model: Model) -> None:
    @tracewire.intervention
    def steps(model, tracer, live):
        streams = [].save()
        for step in tracer.iter[:]:
            streams.append(model.residual(4).output[-1].clone())

    result = await run(client, model, steps, n=2, temperature=1.0, seed=3, max_tokens=6)
    one, two = result.invokes[0].choices
    assert np.array_equal(one.saves["streams"][0], two.saves["streams"][0])
    assert not np.array_equal(one.saves["streams"][-1], two.saves["streams"][-1])


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"min_tokens": 10}, {"ignore_eos": False}])
async def test_stop_finishes_the_request(client: Client, model: Model, options: dict[str, Any]) -> None:
    """At that token, under any sampling params: no end of sequence is forced."""
    result = await run(client, model, blocks.stops_at(at=1), max_tokens=20, **options)
    assert len(result.saves["seen"]) == len(result.token_ids) == 2
    assert result.token_ids == (await run(client, model, max_tokens=2)).token_ids


@tracewire.intervention
def loops(model, tracer, live, count):
    steps = [].save()
    for _ in tracer.iter[:count]:
        steps.append(int(model.logits.argmax(dim=-1)))
    steps.append("after the loop")


async def test_iter_past_the_end_is_cut_short(client: Client, model: Model) -> None:
    result = await run(client, model, loops(count=8), max_tokens=3)
    assert result.saves["steps"] == result.token_ids
    assert result.status == "finished"


async def test_iter_that_fits_goes_on_behind_the_loop(client: Client, model: Model) -> None:
    result = await run(client, model, loops(count=3), max_tokens=3)
    assert result.saves["steps"] == [*result.token_ids, "after the loop"]


async def test_a_generation_cut_short_is_no_error(client: Client, model: Model) -> None:
    tokens = (await run(client, model, max_tokens=6)).token_ids
    result = await run(client, model, loops(count=6), max_tokens=6, stop_token_ids=[tokens[1]])
    assert result.token_ids == tokens[: tokens.index(tokens[1]) + 1]
    assert result.saves["steps"][: len(result.token_ids)] == result.token_ids


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_an_error_has_its_type_its_message_and_its_line(client: Client, model: Model) -> None:
    @tracewire.intervention
    def divides(model, tracer, live):
        hidden = model.model.layers[5].output[0].save()
        1 / 0

    with pytest.raises(InterventionError, match="ZeroDivisionError") as caught:
        await run(client, model, divides, max_tokens=4)
    assert caught.value.source == "1 / 0"


async def test_a_raise_in_a_loop_ends_its_own_trace(client: Client, model: Model) -> None:
    results: dict[str, Any] = {}

    async def one(name: str, block: Any) -> None:
        try:
            results[name] = await run(client, model, block, max_tokens=10)
        except TraceFailed as error:
            results[name] = error

    async with anyio.create_task_group() as group:
        group.start_soon(one, "bad", blocks.raises_at(at=2))
        group.start_soon(one, "good", blocks.logits_and_samples)
    assert isinstance(results["bad"], InterventionError)
    assert len(results["bad"].result.saves["seen"]) == 3
    assert results["good"].saves["sampled"] == results["good"].token_ids


async def test_reads_and_edits_out_of_order(client: Client, model: Model) -> None:
    @tracewire.intervention
    def earlier(model, tracer, live):
        later = model.model.layers[5].output
        first = model.model.layers[0].output

    @tracewire.intervention
    def edits(model, tracer, live):
        later = model.model.layers[5].output
        model.model.layers[3].output = later

    for block in (earlier, edits):
        with pytest.raises(InterventionError, match="already ran past"):
            await run(client, model, block, max_tokens=3)


async def test_an_error_on_one_of_several_prompts(client: Client, model: Model) -> None:
    """Their trace fails and says where; what the others have saved by then is in its result."""

    @tracewire.intervention
    def picky(model, tracer, live):
        whole = model.residual(0).output.save()
        if whole.shape[0] == 3:
            raise ValueError("three tokens")

    with pytest.raises(InterventionError, match="three tokens"):
        await invokes(client, model, picky, [PROMPT, [1, 2, 3]], max_tokens=3)


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_every_output_has_what_was_saved_with_it(client: Client, model: Model) -> None:
    """nnsight's stream has saves on its last output only, for one prompt and one reader."""
    async with client.trace(
        model, prompts=[PROMPT, OTHER], block=blocks.logits_and_samples, max_tokens=5, **GREEDY
    ) as trace:
        outputs = [item async for item in trace if isinstance(item, Output)]
        result = await trace.result()
    for output in outputs:
        assert len(output.deltas) == len(output.token_ids)
        assert all(step for step in output.deltas)
    for invoke in result.invokes:
        text = "".join(output.text for output in outputs if output.invoke == invoke.index)
        assert text == invoke.choices[0].text
    assert result.invokes[0].choices[0].finish_reason == "length"
