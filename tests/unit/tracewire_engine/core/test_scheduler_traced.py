"""Traced requests in vLLM's schedulers, without an engine: whole prompts, no shared KV, kept KV; plain ones as ever.

The made-up worker (`tests/support/schedulers.py`) looks at each step whether the KV that a request's tokens read is
what was computed of them, and by whom: what a traced request computed counts as edited, and may serve nobody else.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.schedulers import PLACES, Core, alone, configuration, prompt
from tracewire_engine.protocol.keys import KEPT_BYTES, STEP_TOKENS

pytest.importorskip("torch")


pytest.importorskip("vllm")


#: How many tokens a step has, and how many the workers take.
STEP, CAPACITY = 8, 48


@pytest.fixture
def config() -> Any:
    """Chunks and caching as vLLM has them by default, with short steps."""
    config = configuration(chunked=True, caching=True, tokens=CAPACITY)
    config.additional_config = {STEP_TOKENS: STEP}
    return config


def test_a_plain_prompt_is_chunked_and_a_traced_one_is_whole(config: Any, depth: int) -> None:
    core = Core(config, 40, depth, "fcfs")
    core.add("plain", prompt(1, 30), 4)
    core.add("traced", prompt(2, 30), 4, traced=True)
    core.settle()
    assert core.worker.counts["plain"][:4] == [8, 8, 8, 6]
    assert core.worker.counts["traced"] == [30, 1, 1, 1]
    assert core.generated == {"plain": alone(prompt(1, 30), 4), "traced": alone(prompt(2, 30), 4)}


def test_a_traced_prompt_has_its_turn_among_long_plain_ones(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("first", prompt(1, 40), 4)
    core.step()
    core.add("traced", prompt(2, 40), 4, traced=True)
    core.add("last", prompt(3, 40), 4)
    core.settle()
    begun = {name: next(place for place, step in enumerate(core.steps) if name in step) for name in core.generated}
    assert begun["first"] < begun["traced"] < begun["last"]
    # It waits for what is left of the first prompt, as a plain one would, and for one step more.
    assert begun["traced"] <= 7
    assert all(core.generated[name] == alone(prompt(number, 40), 4) for number, name in enumerate(core.generated, 1))


def test_room_is_made_beside_those_that_generate(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("talks", prompt(1, 4), 30)
    core.step()
    core.add("whole", prompt(2, CAPACITY - 4), 4, traced=True)
    core.settle()
    # It generates in the very step.
    together = next(step for step in core.steps if "whole" in step)
    assert "talks" in together
    # What takes all that a step can have is alone in it, and nobody loses anything.
    core.add("talks2", prompt(3, 4), 30)
    core.step()
    core.add("all", prompt(4, CAPACITY - 1), 1, traced=True)
    core.add("talks3", prompt(5, 4), 10)
    core.settle()
    assert core.worker.counts["all"] == [CAPACITY - 1]
    assert core.generated["talks2"] == alone(prompt(3, 4), 30)
    assert core.generated["talks3"] == alone(prompt(5, 4), 10)


def test_a_long_prompt_of_lower_threshold_is_whole_too(config: Any, depth: int) -> None:
    config.scheduler_config.long_prefill_token_threshold = 6
    core = Core(config, 60, depth, "fcfs")
    core.add("plain", prompt(1, 20), 10)
    core.add("traced", prompt(2, 20), 4, traced=True)
    core.settle()
    assert max(core.worker.counts["plain"]) <= 8
    assert core.worker.counts["traced"] == [20, 1, 1, 1]
    assert config.scheduler_config.long_prefill_token_threshold == 6


def test_plain_requests_share_prefixes_and_traced_ones_neither_read_nor_write(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    for name, traced in (("traced", True), ("plain", False), ("plain2", False), ("traced2", True), ("plain3", False)):
        core.add(name, prompt(1, 22), 6, traced=traced)
        core.settle()
    cached = core.worker.cached
    # The traced one came first: nothing of it is found. Whole blocks of the plain one are, by plain ones only.
    assert cached == {"traced": 0, "plain": 0, "plain2": 20, "traced2": 0, "plain3": 20}
    assert core.worker.counts["traced2"][0] == 22
    assert len({tuple(tokens) for tokens in core.generated.values()}) == 1


def test_traced_requests_leave_what_is_cached_alone_while_there_is_room(config: Any, depth: int) -> None:
    core = Core(config, 24, depth, "fcfs")
    core.add("plain", prompt(1, 22), 2)
    core.settle()
    for number in range(2, 8):
        core.add(f"traced{number}", prompt(number, 22), 8, traced=True)
        core.settle()
    core.add("again", prompt(1, 22), 2)
    core.settle()
    # Six times as many blocks as there are have come and gone.
    assert core.worker.cached["again"] == 20


def test_a_preempted_trace_goes_on_where_it_was(config: Any, depth: int) -> None:
    # 24 tokens of each: two fit in 13 blocks (one of them is vLLM's own), three do not.
    core = Core(config, 13, depth, "fcfs")
    for number in range(1, 4):
        core.add(f"r{number}", prompt(number, 4), 20, traced=True)
    core.settle()
    for number in range(1, 4):
        assert core.worker.counts[f"r{number}"] == [4] + [1] * 19
        assert core.generated[f"r{number}"] == alone(prompt(number, 4), 20)
    counts = core.scheduler.counts()
    assert counts["preemptions"] > 0
    assert (counts["requests"], counts["kept"], counts["blocks"], counts["free_blocks"]) == (0, 0, 12, 12)
    assert not core.worker.kept


def test_beyond_what_may_be_kept_it_is_computed_anew_as_a_whole(config: Any, depth: int) -> None:
    config.additional_config[KEPT_BYTES] = 0
    core = Core(config, 13, depth, "fcfs")
    for number in range(1, 4):
        core.add(f"r{number}", prompt(number, 4), 20, traced=True)
    core.settle()
    counts = [count for number in range(1, 4) for count in core.worker.counts[f"r{number}"]]
    assert max(counts) > STEP
    for number in range(1, 4):
        assert core.generated[f"r{number}"] == alone(prompt(number, 4), 20)
        assert core.worker.counts[f"r{number}"][0] == 4


def test_what_is_kept_of_an_aborted_trace_is_forgotten(config: Any, depth: int) -> None:
    core = Core(config, 13, depth, "fcfs")
    for number in range(1, 4):
        core.add(f"r{number}", prompt(number, 4), 20, traced=True)
    while not core.worker.kept:
        core.step()
    name = next(iter(core.worker.kept))
    assert core.scheduler.counts()["kept"] == 1
    core.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    assert core.scheduler.counts()["kept"] == 0
    core.settle()
    assert not core.worker.kept
    assert core.scheduler.counts()["free_blocks"] == 12


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_kv_is_right_and_prompts_are_whole(config: Any, depth: int, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    # Sometimes less may be kept than would be.
    config.additional_config[KEPT_BYTES] = rng.choice([1 << 20, 160, 0])
    core = Core(config, rng.choice([14, 18, 30]), depth, policy)
    wanted, paused, aborted = {}, set(), set()
    for number in range(250):
        alive = [name for name in wanted if name not in core.finished and name not in aborted]
        chance = rng.random()
        if chance < 0.14 and len(alive) < 8:
            name = f"r{number}"
            # Few different prompts, so that they share.
            tokens, count = prompt(rng.randrange(3), rng.randrange(1, 30)), rng.randrange(1, 16)
            wanted[name] = tokens, count
            core.add(name, tokens, count, rng.randrange(3), traced=rng.random() < 0.6)
        elif chance < 0.24 and alive:
            paused.add(name := rng.choice(alive))
            core.scheduler.pause_requests([name])
        elif chance < 0.36 and paused:
            name = rng.choice(sorted(paused))
            paused.discard(name)
            core.scheduler.resume_requests([name])
        elif chance < 0.39 and alive:
            aborted.add(name := rng.choice(alive))
            core.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        else:
            core.step()
    core.scheduler.resume_requests(sorted(paused))
    core.settle(3000)
    for name, (tokens, count) in wanted.items():
        if name in aborted:
            continue
        assert core.generated[name] == alone(tokens, count), name
        if name in core.traced:
            first = core.worker.counts[name][0]
            assert first == len(tokens)
            assert core.worker.cached[name] == 0
    counts = core.scheduler.counts()
    assert (counts["requests"], counts["paused"], counts["kept"]) == (0, 0, 0)
    assert counts["free_blocks"] == counts["blocks"]
    assert not core.worker.kept
    assert max(map(len, core.steps)) <= PLACES
