"""Pausing in vLLM's own schedulers, without an engine: a made-up model stands behind them.

Requests come, are paused, resumed and aborted at random, with few blocks and few places. Whatever happens, each
request's tokens are what they are on its own.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.schedulers import PLACES, Core, alone, configuration

pytest.importorskip("torch")


pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def config() -> Any:
    """vLLM's configuration, without chunks and caching."""
    return configuration()


@pytest.fixture(params=["0", "1"], ids=["first", "second"], autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which of vLLM's model runners the scheduler plans."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)


def test_paused_requests_rest_and_the_others_go_on(config: Any, depth: int) -> None:
    core = Core(config, 100, depth, "fcfs")
    core.add("a", [1, 2, 3], 20)
    core.add("b", [4, 5], 20)
    for _ in range(6):
        core.step()
    before = core.count("a")
    assert core.scheduler.pause_requests(["a", "nobody"]) == 1
    core.settle()
    assert core.count("a") == before
    assert core.finished == {"b": "length"}
    # What was sampled before it was paused has come out.
    assert core.generated["a"] == alone([1, 2, 3], before)
    assert core.scheduler.resume_requests(["a"]) == 1
    assert core.scheduler.resume_requests(["a"]) == 0
    core.settle()
    assert core.generated == {"a": alone([1, 2, 3], 20), "b": alone([4, 5], 20)}
    # Not computed anew: its blocks were there all the time.
    assert core.count("a") == 20


def test_an_engine_of_paused_requests_idles_after_one_step_without_tokens(config: Any, depth: int) -> None:
    core = Core(config, 100, depth, "fcfs")
    core.add("a", [1, 2, 3], 20)
    for _ in range(5):
        core.step()
    core.scheduler.pause_requests(["a"])
    core.settle()
    assert core.steps[-1] == set()
    assert core.steps[-2] == {"a"}
    assert not core.has_work
    core.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert core.has_work
    core.settle()
    assert not core.worker.tokens
    assert not core.scheduler.tracewire_paused
    assert core.scheduler.kv_cache_manager.usage == 0
    assert core.scheduler.get_request_counts() == (0, 0)


def test_a_held_engine_idles_and_goes_on_where_it_was(config: Any, depth: int) -> None:
    core = Core(config, 100, depth, "fcfs")
    for number in range(PLACES + 1):
        core.add(f"r{number}", [number + 1], 8)
    for _ in range(3):
        core.step()
    core.scheduler.pause_requests(["r0"])
    core.scheduler.hold(True)
    core.add("late", [9], 8)
    core.settle()
    assert core.steps[-1] == set()
    assert not core.has_work
    core.scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
    core.settle()
    assert core.steps[-1] == set()
    core.scheduler.hold(True, 1)
    core.scheduler.hold(False)
    # Another adapter of the engine still has all requests paused.
    assert core.scheduler.tracewire_held
    core.scheduler.hold(False, 1)
    core.settle()
    # Who was paused by name is so still.
    assert core.scheduler.get_request_counts()[0] + core.scheduler.get_request_counts()[1] == 1
    core.scheduler.resume_requests(["r0"])
    core.settle()
    for name, prompt in (("r0", [1]), ("r2", [3]), ("late", [9])):
        assert core.generated[name] == alone(prompt, 8)
    assert core.scheduler.get_request_counts() == (0, 0)
    assert core.scheduler.kv_cache_manager.usage == 0


def test_a_waiting_request_stays_waiting_and_keeps_its_turn(config: Any, depth: int) -> None:
    core = Core(config, 100, depth, "fcfs")
    for number in range(PLACES + 2):
        core.add(f"r{number}", [number + 1], 6)
    first, second = f"r{PLACES}", f"r{PLACES + 1}"
    core.scheduler.pause_requests([first])
    core.settle()
    assert set(core.finished) == {f"r{number}" for number in range(PLACES + 2)} - {first}
    core.add("later", [9, 9], 6)
    core.scheduler.resume_requests([first])
    core.step()
    assert core.steps[-1] == {first, "later"}
    core.settle()
    assert core.generated[first] == alone([PLACES + 1], 6)
    assert core.generated[second] == alone([PLACES + 2], 6)


def test_a_paused_request_takes_no_place_and_waits_for_one(config: Any, depth: int) -> None:
    core = Core(config, 100, depth, "fcfs")
    for number in range(PLACES):
        core.add(f"r{number}", [number + 1], 12)
    for _ in range(3):
        core.step()
    core.scheduler.pause_requests(["r0", "r1"])
    core.add("new0", [7], 12)
    core.add("new1", [8], 12)
    for _ in range(3):
        core.step()
    assert core.steps[-1] == {"r2", "new0", "new1"}
    core.scheduler.resume_requests(["r0", "r1"])
    core.step()
    assert core.steps[-1] == {"r2", "new0", "new1"}
    core.settle()
    assert max(map(len, core.steps)) == PLACES
    assert core.generated["r0"] == alone([1], 12)
    assert core.generated["r1"] == alone([2], 12)


def test_a_resumed_request_waits_while_its_step_has_no_place_for_its_adapter(config: Any, depth: int) -> None:
    """vLLM takes requests of so many adapters as a step may have, and expects that no others run."""
    config = configuration()
    config.lora_config = SimpleNamespace(max_loras=1)
    core = Core(config, 100, depth, "fcfs")
    core.add("a", [1, 2, 3], 20, lora=1)
    for _ in range(4):
        core.step()
    core.scheduler.pause_requests(["a"])
    core.add("b", [4, 5], 20, lora=2)
    core.add("plain", [6], 20)
    for _ in range(4):
        core.step()
    assert core.count("b")
    core.scheduler.resume_requests(["a"])
    core.add("c", [7], 20, lora=2)
    core.settle()
    prompts = {"a": [1, 2, 3], "b": [4, 5], "plain": [6], "c": [7]}
    assert core.generated == {name: alone(tokens, 20) for name, tokens in prompts.items()}
    assert all(len({"a", "b", "c"} & step) <= 1 or "a" not in step for step in core.steps)
    # Who came first is not overtaken for ever by who comes for the other adapter.
    assert next(iter(core.finished)) in ("plain", "a")


def test_paused_requests_lose_their_blocks_first(config: Any, depth: int) -> None:
    # 24 tokens of each: two fit in 13 blocks (one of them is vLLM's own), three do not.
    core = Core(config, 13, depth, "fcfs")
    core.add("first", [1] * 4, 20)
    for _ in range(14):
        core.step()
    core.scheduler.pause_requests(["first"])
    core.add("running", [2] * 4, 20)
    core.add("waiting", [3] * 4, 20)
    core.settle()
    # Neither was held up: each was in as many steps as it has tokens, in one go.
    assert core.count("running") == core.count("waiting") == 20
    assert not [
        request.request_id for request in core.scheduler.requests.values() if request.status == RequestStatus.RUNNING
    ]
    core.scheduler.resume_requests(["first"])
    core.settle()
    assert core.generated["first"] == alone([1] * 4, 20)


def test_blocks_are_kept_while_nobody_needs_them(config: Any, depth: int) -> None:
    core = Core(config, 13, depth, "fcfs")
    core.add("first", [1] * 4, 20)
    for _ in range(14):
        core.step()
    core.scheduler.pause_requests(["first"])
    core.add("other", [2] * 4, 20)
    core.settle()
    assert core.scheduler.requests["first"].status == RequestStatus.RUNNING
    assert core.scheduler.requests["first"].num_preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_tokens_are_the_same(config: Any, depth: int, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    core = Core(config, rng.choice([13, 16, 24]), depth, policy)
    wanted: dict[str, SimpleNamespace] = {}
    paused: set[str] = set()
    aborted: set[str] = set()
    for number in range(300):
        alive = [name for name in wanted if name not in core.finished and name not in aborted]
        chance = rng.random()
        if chance < 0.12 and len(alive) < 8:
            name = f"r{number}"
            prompt = [rng.randrange(1, 99) for _ in range(rng.randrange(1, 16))]
            wanted[name] = SimpleNamespace(prompt=prompt, count=rng.randrange(1, 30), steps=0)
            core.add(name, prompt, wanted[name].count, priority=rng.randrange(3))
        elif chance < 0.22 and alive:
            some = rng.sample(alive, rng.randrange(1, len(alive) + 1))
            assert core.scheduler.pause_requests(some) == len(some)
            paused.update(some)
        elif chance < 0.34 and alive:
            some = rng.sample(alive, rng.randrange(1, len(alive) + 1))
            core.scheduler.resume_requests(some)
            paused.difference_update(some)
        elif chance < 0.37 and alive:
            name = rng.choice(alive)
            core.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            aborted.add(name)
        made = len(core.steps)
        if core.has_work:
            core.step()
        for step in core.steps[made:]:
            assert not step & (paused - aborted)
            assert len(step) <= PLACES
        alive = {name for name in wanted if name not in core.finished and name not in aborted}
        assert set(core.scheduler.requests) == alive
        queues = [*core.scheduler.running, *core.scheduler.waiting]
        for name in ("kv_holding_waiting", "skipped_waiting"):
            queues += getattr(core.scheduler, name, ())
        assert sorted(request.request_id for request in queues) == sorted(alive)
    core.settle()
    core.scheduler.resume_requests(list(wanted))
    core.settle(2000)
    for name, one in wanted.items():
        whole = alone(one.prompt, one.count)
        if name in aborted:
            assert core.generated[name] == whole[: len(core.generated[name])]
        else:
            assert core.generated[name] == whole
    assert not core.worker.tokens
    assert core.scheduler.kv_cache_manager.usage == 0
