"""Drafts in vLLM's schedulers, without an engine: which requests have them, and which have one token in each step.

The made-up worker (`tests/support/schedulers.py`) drafts tokens, some of which are wrong. It checks that the KV that
each token reads is of the request's own text.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.schedulers import Core, alone, configuration, prompt
from tracewire_engine.protocol.keys import STEP_TOKENS

pytest.importorskip("vllm")

DRAFTS, STEP, CAPACITY = 3, 12, 48


@pytest.fixture
def config() -> Any:
    """Chunks and caching as vLLM has them by default, with short steps, and drafts."""
    config = configuration(chunked=True, caching=True, tokens=CAPACITY, drafts=DRAFTS)
    config.additional_config = {STEP_TOKENS: STEP}
    return config


def test_plain_requests_are_drafted_and_traced_ones_beside_them_are_not(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("plain", prompt(1, 6), 24)
    core.add("traced", prompt(2, 6), 24, traced=True)
    core.settle()
    assert core.generated == {"plain": alone(prompt(1, 6), 24), "traced": alone(prompt(2, 6), 24)}
    assert core.worker.counts["traced"] == [6] + [1] * 23
    tried = core.worker.tried
    assert tried.keys() == {"plain"}
    assert {taken for _, taken in tried["plain"]} > {0, 1}
    counts = core.scheduler.counts()
    assert 0 < counts["taken"] < counts["drafted"]
    # Fewer steps than tokens.
    assert core.count("plain") < 20


def test_a_trace_that_the_adapter_lets_be_drafted_is(config: Any, depth: int) -> None:
    """Its prompt is computed in one step all the same."""
    core = Core(config, 60, depth, "fcfs")
    core.add("drafted", prompt(1, STEP + 8), 24, traced=True, drafted=True)
    core.add("traced", prompt(2, 6), 24, traced=True)
    core.settle()
    assert core.generated == {"drafted": alone(prompt(1, STEP + 8), 24), "traced": alone(prompt(2, 6), 24)}
    counts = core.worker.counts["drafted"]
    assert counts[0] == STEP + 8
    assert max(counts[1:]) == 1 + DRAFTS
    assert core.worker.tried.keys() == {"drafted"}
    assert core.count("drafted") < 20
    assert core.worker.counts["traced"] == [6] + [1] * 23


def test_a_request_is_drafted_behind_the_tokens_that_it_is_given(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("given", prompt(1, 6), 24, forced=5)
    core.settle()
    counts = core.worker.counts["given"]
    assert counts[:5] == [6, 1, 1, 1, 1]
    assert max(counts[5:]) == 1 + DRAFTS


def test_a_trace_is_drafted_behind_the_tokens_that_it_is_given(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("given", prompt(1, 6), 24, forced=5, traced=True, drafted=True)
    core.settle()
    counts = core.worker.counts["given"]
    assert counts[:5] == [6, 1, 1, 1, 1]
    assert max(counts[5:]) == 1 + DRAFTS


def test_a_trace_whose_prompt_is_one_token_is_not_padded(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("plain", prompt(1, 4), 30)
    for _ in range(4):
        core.step()
    core.add("traced", prompt(2, 1), 8, traced=True)
    core.add("short", prompt(3, 1), 8)
    core.settle()
    assert core.worker.counts["traced"] == [1] * 8
    assert core.generated == {
        "plain": alone(prompt(1, 4), 30),
        "traced": alone(prompt(2, 1), 8),
        "short": alone(prompt(3, 1), 8),
    }
    assert not core.scheduler._may_pad_wrongly()


def test_a_preempted_trace_with_drafts_goes_on_where_it_was(config: Any, depth: int) -> None:
    """The workers keep what it has computed without the drafts that were not taken."""
    core = Core(config, 14, depth, "fcfs")
    core.add("plain", prompt(1, 4), 24)
    for number in (2, 3):
        core.add(f"r{number}", prompt(number, 4), 20, traced=True, drafted=True)
    core.settle()
    assert core.scheduler.counts()["preemptions"] > 0
    for number in (2, 3):
        counts = core.worker.counts[f"r{number}"]
        assert counts[0] == 4
        assert max(counts[1:]) == 1 + DRAFTS
        assert core.generated[f"r{number}"] == alone(prompt(number, 4), 20)
    assert core.generated["plain"] == alone(prompt(1, 4), 24)


def test_a_preempted_trace_goes_on_with_one_token_where_it_was(config: Any, depth: int) -> None:
    core = Core(config, 14, depth, "fcfs")
    core.add("plain", prompt(1, 4), 24)
    for number in (2, 3):
        core.add(f"r{number}", prompt(number, 4), 20, traced=True)
    core.settle()
    assert core.scheduler.counts()["preemptions"] > 0
    for number in (2, 3):
        assert core.worker.counts[f"r{number}"] == [4] + [1] * 19
        assert core.generated[f"r{number}"] == alone(prompt(number, 4), 20)
    assert core.generated["plain"] == alone(prompt(1, 4), 24)


def test_a_traced_prompt_gets_its_room_beside_drafted_requests(config: Any, depth: int) -> None:
    core = Core(config, 60, depth, "fcfs")
    core.add("talks", prompt(1, 4), 30)
    core.step()
    core.add("whole", prompt(2, CAPACITY - 6), 4, traced=True)
    core.settle()
    assert core.worker.counts["whole"] == [CAPACITY - 6, 1, 1, 1]
    # One that leaves no room for the drafts of the others.
    core.add("talks2", prompt(3, 4), 30)
    core.step()
    core.add("all", prompt(4, CAPACITY - 1), 1, traced=True)
    core.settle()
    assert core.worker.counts["all"] == [CAPACITY - 1]
    assert core.generated["talks2"] == alone(prompt(3, 4), 30)


def test_what_a_drafting_model_takes_of_a_step_is_left_to_it(config: Any) -> None:
    """A prompt that fits only without these places is cut, and does not block the queue."""
    core = Core(config, 60, 1, "fcfs")
    core.scheduler._slots = 1
    assert core.scheduler._is_cut(_Waiting(CAPACITY - 1), CAPACITY - 2)
    assert not core.scheduler._is_cut(_Waiting(CAPACITY), CAPACITY - 1)


class _Waiting:
    """A request of so many tokens that waits."""

    num_computed_tokens = 0

    def __init__(self, tokens: int) -> None:
        self.num_tokens = tokens


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_come_pause_and_go_get_their_own_tokens(config: Any, depth: int, policy: str, seed: int) -> None:
    dice = random.Random(f"{seed} {policy} {depth}")
    core = Core(config, dice.choice((14, 20, 60)), depth, policy)
    wanted: dict[str, list[int]] = {}
    undrafted: set[str] = set()
    for number in range(1, 11):
        length, count = dice.choice((1, 3, 9, 17)), dice.randrange(1, 24)
        traced, drafted = dice.random() < 0.7, dice.random() < 0.5
        core.add(f"r{number}", prompt(number, length), count, dice.randrange(3), traced=traced, drafted=drafted)
        if traced and not drafted:
            undrafted.add(f"r{number}")
        wanted[f"r{number}"] = alone(prompt(number, length), count)
        for _ in range(dice.randrange(4)):
            core.step()
        if dice.random() < 0.4:
            core.scheduler.pause_requests([f"r{dice.randrange(1, number + 1)}"])
        if dice.random() < 0.4:
            core.scheduler.resume_requests(list(wanted))
    core.scheduler.resume_requests(list(wanted))
    core.settle(600)
    assert core.generated == wanted
    assert core.worker.tried.keys().isdisjoint(undrafted)
    counts = core.scheduler.counts()
    assert (counts["requests"], counts["kept"], counts["free_blocks"]) == (0, 0, counts["blocks"])
