"""Which samplers of vLLM's second runner write nothing new in a step without new requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.sampler_states import changes_with_requests_alone

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
