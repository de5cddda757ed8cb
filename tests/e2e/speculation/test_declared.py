"""Traces with declared interventions that are drafted come to what they do without drafts, whatever happens to them."""

# mypy: ignore-errors

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

from tests.support.drafted_kinds import AFTER, DRAFTED
from tests.support.engine_inside import counts, engine_inside, forgotten
from tests.support.parallel.scenarios import outcome, same
from tests.support.speculation import GREEDY, NGRAM, apart, text
from tests.support.steering import check_order, direction, held_up, schedule_of, steer_along
from tracewire import Client, Live, Model, Output, Probe, Steer, StopWhen, TraceEnded, connect


def steered(model: Model) -> list[Any]:
    """An edit with a live strength, and a read behind it."""
    return [Steer("residual(2)", direction(model), scale=Live("alpha")), Probe("behind", "residual(5)"), AFTER]


async def test_a_change_while_it_runs_holds_from_the_token_that_the_event_names(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    """A trace without drafts whose schedule has the same changes at the same tokens is the same."""
    sampling, theirs = {**GREEDY, "max_tokens": 200}, await client.models.get("demo", timeout=60)
    before = await counts(drafted[0])
    async with (
        held_up(ours, model_of_ours),
        ours.trace(model_of_ours, text(1), interventions=steered(theirs), live={"alpha": 0.0}, **sampling) as trace,
    ):
        items = await steer_along(trace, [0.25, -0.5, 0.75, 0.1], 30, in_turn=True)
        result = await trace.result()
    after = await counts(drafted[0])
    assert after["drafted"] > before["drafted"]
    check_order(items)
    values = schedule_of(items, 0.0, 200)
    assert len(set(values)) > 2
    changes = {index: {"alpha": value} for index, value in enumerate(values) if index and value != values[index - 1]}
    known = await client.trace(
        theirs, text(1), interventions=steered(theirs), live={"alpha": 0.0}, schedule=changes, **sampling
    ).result()
    assert result.token_ids == known.token_ids
    assert not apart(known.saves, result.saves)


async def test_it_is_paused_again_and_again_beside_others(ours: Client, model_of_ours: Model, client: Client) -> None:
    theirs = await client.models.get("demo", timeout=60)
    kinds = ("probes", "steer", "under ids", "clamp")
    found: dict[str, Any] = {}
    pauses = 0

    async def rests(name: str, number: int) -> None:
        nonlocal pauses
        declared, sampling = DRAFTED[name](number), {**GREEDY, "max_tokens": 90}
        async with ours.trace(model_of_ours, text(number), interventions=declared, **sampling) as trace:
            left = [7 * count + number for count in range(1, 12)]
            async for item in trace:
                if isinstance(item, Output) and left and item.index >= left[0]:
                    left = [index for index in left if index > item.index]
                    with suppress(TraceEnded):
                        pauses += await trace.pause()
                        await trace.resume()
            found[name] = await trace.result()

    async with held_up(ours, model_of_ours), anyio.create_task_group() as group:
        for number, name in enumerate(kinds):
            group.start_soon(rests, name, number)
    assert pauses > 3
    for number, name in enumerate(kinds):
        declared = DRAFTED[name](number)
        known = await client.trace(theirs, text(number), interventions=declared, **GREEDY, max_tokens=90).result()
        assert found[name].token_ids == known.token_ids, name
        assert not apart(known.saves, found[name].saves), name


async def test_it_ends_at_the_token_at_which_it_ends_without_drafts(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    """By a condition on a probe, a text, its number of tokens; behind given tokens; several prompts; a constraint."""
    theirs = await client.models.get("demo", timeout=60)
    steer = Steer("residual(4)", direction(theirs), scale=0.25)
    reads = [steer, Probe("score", "residual(5)", direction(theirs)), AFTER]
    plain = {"prompt": text(2), "interventions": reads, "max_tokens": 40}
    known = await outcome(client, theirs, **plain)
    scores = known["choices"][0][1]["score"]
    # Three tokens are above it.
    stop = StopWhen("score", above=sorted(scores)[-4])
    for options in (
        {},
        {"interventions": [*reads, stop]},
        {"stop": ["\n\n"]},
        {"max_tokens": 3},
        {"forced_tokens": [11, 12, 13, 11, 12, 13, 11, 12]},
        {"prompt": [text(2), text(3)]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "structured_outputs": {"regex": "(ab|cd){12}"}, "ignore_eos": False},
    ):
        before = await counts(drafted[0])
        here = await outcome(ours, model_of_ours, **{**plain, **options})
        there = await outcome(client, theirs, **{**plain, **options})
        assert [one[0] for one in here["choices"]] == [one[0] for one in there["choices"]], options
        for one, other in zip(here["choices"], there["choices"], strict=True):
            assert not apart(other[1], one[1]), options
            assert one[2] == other[2], options
        # Each delta came with its own token.
        assert not same(there["steps"], here["steps"]), options
        assert here["status"] == there["status"], options
        assert (await counts(drafted[0]))["drafted"] > before["drafted"] or options.get("max_tokens") == 3, options
    # Drafts change what a seed draws.
    drawn = await outcome(ours, model_of_ours, **{**plain, "n": 3, "temperature": 0.8, "seed": 3})
    assert [len(one[0]) for one in drawn["choices"]] == [len(one[1]["score"]) for one in drawn["choices"]] == [40] * 3


async def test_a_standing_intervention_acts_on_the_drafts_of_plain_requests(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    theirs = await client.models.get("demo", timeout=60)
    standing = [Steer("residual(4)", direction(theirs), scale=0.5), Probe("read", "residual(5)")]
    found = []
    before = await counts(drafted[0])
    for one, model in ((ours, model_of_ours), (client, theirs)):
        edits = one.edits("demo")
        try:
            await edits.install("calm", interventions=standing)
            found.append([await outcome(one, model, prompt=text(number), max_tokens=30) for number in range(3)])
            found[-1] += [
                await outcome(one, model, prompt=text(number), max_tokens=30, interventions=DRAFTED["clamp"](number))
                for number in range(3)
            ]
        finally:
            await edits.clear()
    assert not same(found[1], found[0])
    assert (await counts(drafted[0]))["drafted"] > before["drafted"]
    assert found[0][0]["choices"][0][1]["calm/read"]


async def at_once(client: Client, declared: list[list[Any]], tokens: int) -> list[Any]:
    """What requests that run at once come to, each with its interventions."""
    model = await client.models.get("demo", timeout=60)
    found: dict[int, Any] = {}

    async def one(number: int) -> None:
        sampling = {**GREEDY, "max_tokens": tokens + number % 5}
        trace = client.trace(model, text(number), interventions=declared[number], **sampling)
        found[number] = await trace.result()

    async with anyio.create_task_group() as group:
        for number in range(len(declared)):
            group.start_soon(one, number)
    return [found[number] for number in range(len(declared))]


def check(found: list[Any], known: list[Any], what: Any, tolerance: float | None = None) -> None:
    """Requests came to what they do without drafts."""
    for number, (one, other) in enumerate(zip(found, known, strict=True)):
        assert one.token_ids == other.token_ids, (what, number)
        differ = apart(other.saves, one.saves, tolerance)
        assert not differ, (what, number, differ)


async def compared_when_preempted(undrafted: dict[str, Any], drafted: dict[str, Any]) -> None:
    """Requests that engines with drafts preempt come to what they do on one without drafts, which preempts none.

    Args:
        undrafted: the settings of the engine without drafts.
        drafted: those of the others: one keeps copies of what preempted requests have computed, and one does not.
    """
    declared = [kind(number) for number, kind in enumerate(DRAFTED.values())]
    found = []
    for options in (undrafted, {**drafted, "kept_bytes": 1 << 30}, {**drafted, "kept_bytes": 0}):
        async with engine_inside(**options) as (engine, url), connect(url) as one:
            found.append(await at_once(one, declared, 120))
            there = await counts(engine)
            await forgotten(engine)
        if len(found) > 1:
            assert there["preemptions"] > 3
            assert there["taken"] > 100
            check(found[-1], found[0], options["kept_bytes"], tolerance=2.0**-16)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_it_goes_on_where_it_was_when_it_was_preempted(starts_engine: None) -> None:
    """With KV blocks for a few requests: with copies of what preempted ones have computed, and without.

    In float32, so that what is read late in a trace shows what was computed early.
    """
    short = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 512, "kv_cache_memory_bytes": 6 << 20}
    await compared_when_preempted({**short, "kv_cache_memory_bytes": 256 << 20}, {**short, "speculative_config": NGRAM})


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_edits_that_are_sums_come_to_the_same_in_float32(starts_engine: None) -> None:
    """Where a rounded sum cannot turn a step of bfloat16 over, reads behind it are the same but for the last bits."""
    kinds = [kind for kind in DRAFTED.values() if any(getattr(one, "name", "") == "near_after" for one in kind(0))]
    declared = [kind(number) for kind in kinds for number in range(10)]
    found = []
    for config in (NGRAM, None):
        options = {"dtype": "float32", "max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}
        async with engine_inside(speculative_config=config, **options) as (engine, url), connect(url) as one:
            found.append(await at_once(one, declared, 30))
            there = await counts(engine)
            await forgotten(engine)
        assert (there["taken"] > 100) == (config is not None)
    check(*found, "float32", tolerance=2.0**-20)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_each_kind_is_drafted(drafted: tuple[Any, str], ours: Client, client: Client) -> None:
    """A dozen requests of one kind at once come to what they do without drafts. Prints the acceptance rates."""
    for name, kind in DRAFTED.items():
        declared = [kind(number) for number in range(12)]
        before = await counts(drafted[0])
        found = await at_once(ours, declared, 30)
        after = await counts(drafted[0])
        proposed, taken = (after[key] - before[key] for key in ("drafted", "taken"))
        print(f"{name}: {taken} of {proposed} ({taken / proposed:.2f})")
        assert taken > 0, name
        check(found, await at_once(client, declared, 30), name)
