"""Tracewire's runner on vLLM's first one, over a made-up model: a block's steps, and what nnsight would collect."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

import tracewire
from benchmarks.blocks import LAYER, _Link, _Runner, _scheduled
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.worker.blocks import time_limit as watchdog


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    made: Any = _Runner(8)
    with mock.patch("tracewire_engine.worker.runner_parts.cached_tokenizer_from_config", return_value=None):
        made.load_model()
    made.tracewire_reporter.link = _Link()
    yield made
    # It would interrupt tests of other modules.
    watchdog.limit_turns(0)


@tracewire.intervention
def norms(model, tracer, live):
    found = [].save()
    for _ in tracer.iter[:]:
        found.append(float(model.model.layers[2].output[0].norm()))


def test_what_a_block_saved_is_what_nnsight_collects(runner: Any) -> None:
    assert LAYER == 2
    name = "0x1-0000abcd"
    extra = {BLOCK_ARG: msgspec.msgpack.encode(norms().block())}
    fresh = [SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra))]
    with torch.inference_mode():
        for step in range(3):
            runner.execute_model(_scheduled({name: 16 if step == 0 else 1}, [] if step else fresh, set()))
            runner.sample_tokens()
    request = runner.tracewire_requests.requests[name]
    (found,) = request.saves().values()
    assert len(found) == 3
    assert runner.collected(request) == {"found": found}
    with torch.inference_mode():
        runner.execute_model(_scheduled({}, [], {name}))
    assert runner.tracewire_request_count() == 0


def test_the_head_of_a_runner_has_at_most_256_mib_of_logits_at_once(runner: Any) -> None:
    assert runner.tracewire_declared.lens_rows == (256 << 20) // (6 * 128_256)
