"""Speculative decoding by n-grams: requests come to the same, whether they are drafted or not."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import pytest

from tests import gpu_drafts
from tests.support.blocks import parallel as blocks
from tests.support.drafted_kinds import DRAFTED
from tests.support.engine_inside import counts
from tests.support.engine_process import EngineProcess
from tests.support.parallel.scenarios import SCENARIOS, outcome, same
from tests.support.speculation import GREEDY, compared, drafting, text
from tracewire import AttentionPattern, Client, Hold, Live, Model, Probe, Steer, When
from tracewire_bus.wire.messages import Drafts

#: The scenarios that are not run in each session: all of them are, marked `full`.
_SOON = ("logits_and_samples", "forced_tokens", "rests", "live", "declared_stop")


async def test_requests_of_all_kinds_come_to_what_they_do_without_drafts(
    drafted: tuple[Any, str], ours: Client, engine: EngineProcess, client: Client
) -> None:
    before = await counts(drafted[0])
    await compared(ours, client, 4 * len(DRAFTED), 32, 20)
    after = await counts(drafted[0])
    assert after["drafted"] - before["drafted"] > 4 * len(DRAFTED)
    assert after["taken"] > before["taken"]


@pytest.mark.parametrize(
    "name", [name if name in _SOON else pytest.param(name, marks=pytest.mark.full) for name in SCENARIOS]
)
async def test_each_scenario_beside_drafted_requests(
    name: str, drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    async with drafting(drafted[0], ours, model_of_ours) as drafts:
        here = await SCENARIOS[name](ours, model_of_ours)
    there = await SCENARIOS[name](client, await client.models.get("demo", timeout=60))
    # Features are sums in float32, which a step with other rows can round otherwise.
    assert not same(there, here, tolerance=2.0**-20)
    assert drafts["drafted"] > 0


async def accepted_drafts(client: Client, model: Model, **options: Any) -> list[Drafts]:
    """What `Accepted` says of the drafts of a short trace."""
    async with client.trace(model, text(1), **options, **GREEDY, max_tokens=2) as trace:
        await trace.result()
        return (await client.get_state(trace.id)).accepted.drafts


async def test_accepted_says_what_is_drafted_and_why_not(ours: Client, model_of_ours: Model) -> None:
    vector = [1.0] + [0.0] * 255
    live = {"live": {"alpha": 0.0}}
    steer = Steer("residual(4)", vector, scale=Live("alpha"))
    score = Probe("score", "residual(3)", vector)
    block, pattern = "a block runs once for each token", AttentionPattern("pattern", "heads(1)")
    for options, drafts in (
        ({}, Drafts(3)),
        ({"interventions": [steer], **live}, Drafts(3)),
        ({"block": blocks.fed}, Drafts(0, block)),
        ({"block": blocks.fed, "interventions": [steer], **live}, Drafts(0, block)),
        ({"interventions": [pattern]}, Drafts(0, "an AttentionPattern keeps the keys of each step")),
        (
            {"interventions": [score, Hold("held", "residual(3)", vector, "score", 1.0, min=-1.0, max=1.0)]},
            Drafts(0, "a Hold goes on from the step before"),
        ),
        (
            {"interventions": [score, Steer("residual(4)", vector, when=When(probe="score", above=0.0))]},
            Drafts(0, "a condition on a probe goes on from the step before"),
        ),
        (
            {"interventions": [steer], **live, "schedule": {1: {"alpha": 1.0}}},
            Drafts(0, "scheduled changes of live parameters begin at a token of their own"),
        ),
    ):
        assert await accepted_drafts(ours, model_of_ours, **options) == [drafts], options
    edits = ours.edits("demo")
    try:
        await edits.install("calm", interventions=[Steer("residual(4)", vector, scale=2.0)])
        assert await accepted_drafts(ours, model_of_ours) == [Drafts(3)]
        await edits.install("wild", blocks.fed)
        assert await accepted_drafts(ours, model_of_ours) == [Drafts(0, "a standing block runs once for each token")]
    finally:
        await edits.clear()


async def test_a_drafted_trace_is_paused_cancelled_and_given_its_first_tokens(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    theirs = await client.models.get("demo", timeout=60)
    plain = {"prompt": text(2), "max_tokens": 60}
    async with ours.trace(model_of_ours, text(2), **GREEDY, max_tokens=60) as trace:
        async for output in trace.outputs():
            if output.index > 20:
                break
        assert await trace.pause()
        await trace.resume()
        paused = await trace.result()
    assert same((await outcome(client, theirs, **plain))["choices"][0][0], paused.token_ids) == []
    first = [11, 12, 13, 11, 12, 13, 11, 12]
    for options in ({"forced_tokens": first}, {"prompt_logprobs": 2, "logprobs": 2}, {"stop": ["\n\n"]}):
        before = await counts(drafted[0])
        here = await outcome(ours, model_of_ours, **plain, **options)
        there = await outcome(client, theirs, **plain, **options)
        assert [one[0] for one in here["choices"]] == [one[0] for one in there["choices"]], options
        assert here["choices"][0][2] == there["choices"][0][2], options
        assert (await counts(drafted[0]))["drafted"] > before["drafted"], options
        if "forced_tokens" in options:
            assert here["choices"][0][0][: len(first)] == first
    # Drafts change what a seed draws.
    drawn = await outcome(ours, model_of_ours, **plain, n=2, temperature=0.8, seed=3)
    assert [len(one[0]) for one in drawn["choices"]] == [60, 60]


async def test_what_the_program_for_gpus_asks_and_compares(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    """On a CPU, without graphs: it counts drafts, finds nothing apart, and finds what is."""
    kinds = ("probes", "clamp", "under ids", "logit lenses")
    theirs = await client.models.get("demo", timeout=60)
    before = await counts(drafted[0])
    await gpu_drafts.counted(ours, model_of_ours)
    found = await gpu_drafts.came_to(ours, model_of_ours, kinds, tokens=16)
    seen, after = await gpu_drafts.counted(ours, model_of_ours), await counts(drafted[0])
    for name in ("drafted", "taken"):
        assert seen[name] == after[name] - before[name], name
    known = await gpu_drafts.came_to(client, theirs, kinds, tokens=16, logprobs=True)
    figures = gpu_drafts.compared(found, known, 0.01) | seen
    assert gpu_drafts.good(figures, eager=True)
    assert figures["equal"] == figures["requests"] == len(found)
    # No step ran as a whole graph.
    assert not gpu_drafts.good(figures, eager=False)
    found["clamp"]["saves"]["near_behind"] = [item + 1 for item in found["clamp"]["saves"]["near_behind"]]
    found["probes"]["tokens"][3] += 1
    found["plain 0"]["tokens"].pop()
    differing = gpu_drafts.compared(found, known, 0.01)["differing"]
    assert differing.keys() == {"clamp", "probes", "plain 0"}
    assert differing["probes"].startswith("token 3 is")


async def test_a_drafted_constraint_holds(
    drafted: tuple[Any, str], ours: Client, model_of_ours: Model, client: Client
) -> None:
    theirs = await client.models.get("demo", timeout=60)
    asked = {"structured_outputs": {"regex": "(ab|cd){12}"}, "temperature": 0.0, "max_tokens": 40}
    texts = []
    for one, served in ((ours, model_of_ours), (client, theirs)):
        async with one.trace(served, text(3), **asked) as trace:
            texts.append((await trace.result()).text)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_500_requests_come_to_the_same_with_and_without_drafts(
    drafted: tuple[Any, str], ours: Client, engine: EngineProcess, client: Client
) -> None:
    before = await counts(drafted[0])
    await compared(ours, client, 500, 32, 24)
    after = await counts(drafted[0])
    proposed, taken = (after[name] - before[name] for name in ("drafted", "taken"))
    assert proposed > 500
    print(f"{taken} of {proposed} drafted tokens were taken ({taken / proposed:.2f})")
    assert taken / proposed > 0.1
