"""What samplers of vLLM's second runner do, and ask, in steps with the same requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import states as sampling_states
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.sampler_states import RememberedRows, changes_with_requests_alone

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)


def sampler(kind: type[Sampler] = Sampler, **options: Any) -> Sampler:
    states = RequestState(4, 32, 32, 1, 100, CPU)
    return kind(VllmConfig(), 4, 100, CPU, states, **options)


class Own(LogitsProcessor):
    """An operator's, which may count the calls."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        return logits


class Custom(Sampler):
    """A model's."""


def tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors of an object of vLLM's and of those that it has."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item, seen)
    elif type(value).__module__.startswith("vllm.v1.worker.gpu"):
        for _, item in sorted(vars(value).items()):
            yield from tensors(item, seen)


def state(one: Sampler) -> list[np.ndarray[Any, Any]]:
    return [tensor.numpy().copy() for tensor in tensors(one, set())]


def test_vllms_own_sampler_writes_nothing_new_without_new_requests() -> None:
    one = sampler(enable_trace_replay=True)
    assert changes_with_requests_alone(one)
    empty = state(one)
    for place, options in enumerate(({"temperature": 0.5, "seed": 7}, {"top_p": 0.5, "min_p": 0.25}, {"top_k": 3})):
        one.add_request(place, SamplingParams(**options))
        one.apply_staged_writes()
        # vLLM has two buffers of each, and writes to them by turns.
        one.apply_staged_writes()
        settled = state(one)
        for _ in range(3):
            one.apply_staged_writes()
            assert all(map(np.array_equal, state(one), settled))
    assert not all(map(np.array_equal, state(one), empty))


@pytest.mark.parametrize("kind", ["an operator's processor", "a model's sampler", "another part", "no sampler of vLLM"])
def test_a_sampler_that_may_do_more_is_asked_in_every_step(kind: str) -> None:
    one: Any = {
        "an operator's processor": lambda: sampler(custom_logits_processors=[Own(VllmConfig(), None)]),  # type: ignore[arg-type]
        "a model's sampler": lambda: sampler(Custom),
        "another part": sampler,
        "no sampler of vLLM": object,
    }[kind]()
    if kind == "another part":
        one.added = Own(VllmConfig(), None)  # type: ignore[arg-type]
    assert not changes_with_requests_alone(one)


#: Of which each request has a few.
OPTIONS: dict[str, list[Any]] = {
    "temperature": [0.0, 1.0, 0.5],
    "top_k": [0, 5, 200],
    "top_p": [1.0, 0.5],
    "min_p": [0.0, 0.25],
    "seed": [None, 7],
    "logprobs": [None, 3, -1],
    "logprob_token_ids": [None, [3, 4]],
}


def answers(one: Sampler, rows: np.ndarray[Any, Any]) -> list[Any]:
    """What the sampler asks in a step, and which of its kernels it runs."""
    states: Any = one.sampling_states
    found = [
        states.max_num_logprobs(rows),
        one.logprob_token_ids_state.max_num_token_ids(rows),
        states.any_greedy(rows),
        states.any_explicit_seed(rows),
        *states.get_top_k_top_p(torch.from_numpy(rows).long(), rows),
    ]
    ran.clear()
    logits, expanded = torch.zeros(len(rows), 100), torch.from_numpy(rows).long()
    states.apply_temperature(logits, expanded, rows)
    states.apply_min_p(logits, expanded, rows)
    return [*[one.tolist() if isinstance(one, torch.Tensor) else one for one in found], *ran]


#: The kernels that ran.
ran: list[str] = []


@pytest.mark.parametrize("seed", range(20))
def test_a_sampler_that_remembers_answers_as_one_that_asks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_states, "apply_temperature", lambda *_: ran.append("temperature"))
    monkeypatch.setattr(sampling_states, "apply_min_p", lambda *_: ran.append("min_p"))
    rng, both = random.Random(seed), (sampler(), sampler())
    remembered = RememberedRows(both[1])
    rows = np.arange(2, dtype=np.int32)
    for _ in range(60):
        if rng.random() < 0.3:
            # As the runner does: the place may have had another request.
            chosen = {name: rng.choice(values) for name, values in OPTIONS.items() if rng.random() < 0.3}
            remembered.forget()
            place, params = rng.randrange(4), SamplingParams(**chosen)
            for one in both:
                one.add_request(place, params)
                # The other parts write with kernels.
                one.sampling_states.apply_staged_writes()
        if rng.random() < 0.4:
            rows = np.array(rng.sample(range(4), rng.randint(1, 4)), dtype=np.int32)
        assert answers(both[1], rows) == answers(both[0], rows)


def test_each_question_is_asked_once_while_the_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked = sampler(), list[str]()
    states: Any = one.sampling_states
    for part, name in ((states, "max_num_logprobs"), (one.logprob_token_ids_state, "max_num_token_ids")):
        query = getattr(part, name)
        monkeypatch.setattr(part, name, lambda rows, name=name, query=query: asked.append(name) or query(rows))
    remembered, rows = RememberedRows(one), np.arange(3, dtype=np.int32)
    for _ in range(3):
        answers(one, rows)
    assert asked == ["max_num_logprobs", "max_num_token_ids"]
    answers(one, rows[:2])
    assert len(asked) == 4
    remembered.forget()
    answers(one, rows[:2])
    assert len(asked) == 6


class _Part:
    """A part as vLLM's before 0.29, which notes that it was applied."""

    def __init__(self, name: str, column: str, values: Any, applied: list[str]) -> None:
        setattr(self, column, values)
        setattr(self, f"apply_{name}", lambda logits, expanded, rows, *more: applied.append(name))


def test_parts_of_earlier_versions_are_applied_where_a_request_uses_them() -> None:
    one: Any = sampler()
    applied, bad = list[str](), type("Column", (), {"np": np.array([0, 0, 2, 0])})()
    one.logit_bias_state = _Part("logit_bias", "use_logit_bias", np.array([0, 1, 0, 0], bool), applied)
    one.penalties_state = _Part("penalties", "use_penalty", np.array([1, 0, 0, 0], bool), applied)
    one.bad_words_state = _Part("bad_words", "num_bad_words", bad, applied)
    RememberedRows(one)
    for rows, wanted in (
        ([0, 1], ["logit_bias", "penalties"]),
        ([3], []),
        ([2, 3], ["bad_words"]),
        ([3, 1], ["logit_bias"]),
    ):
        for _ in range(2):
            applied.clear()
            places, logits = np.array(rows, np.int32), torch.zeros(len(rows), 100)
            one.logit_bias_state.apply_logit_bias(logits, None, places, None)
            one.penalties_state.apply_penalties(logits, None, places, None, None)
            one.bad_words_state.apply_bad_words(logits, None, places, None, None)
            assert applied == wanted
