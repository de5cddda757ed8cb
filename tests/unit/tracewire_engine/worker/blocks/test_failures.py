"""A block that has ended leaves nothing behind for a garbage collection to find: its tensors are the device's memory.

Tracewire's runner steps over the made-up model of `benchmarks/blocks.py` here: no engine.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import tracewire
from benchmarks.blocks import LAYER, _Runner, one_round
from tracewire_engine.worker.blocks import time_limit as watchdog

STEPS = 4


@tracewire.intervention
def outruns(model, tracer, live, layer):
    kept = [].save()
    for _ in tracer.iter[:]:
        kept.append(model.model.layers[layer].output[0][-1].clone())


@tracewire.intervention
def comes_to_its_end(model, tracer, live, layer):
    kept = model.model.layers[layer].output[0][-1].clone().save()
    unsaved = kept + 1


@tracewire.intervention
def raises(model, tracer, live, layer):
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(model.model.layers[layer].output[0][-1].clone())
        if step == 2:
            raise ValueError("enough")


@tracewire.intervention
def raises_of_another(model, tracer, live, layer):
    kept = [].save()

    def inner(value):
        raise KeyError("inner")

    for _ in tracer.iter[:]:
        kept.append(model.model.layers[layer].output[0][-1].clone())
        try:
            inner(kept[-1])
        except KeyError as error:
            raise ValueError("outer") from error


@tracewire.intervention
def raises_what_looks_after_itself(model, tracer, live, layer):
    class Stubborn(Exception):
        def __setattr__(self, name, value):
            raise RuntimeError("no")

        def __getattr__(self, name):
            raise RuntimeError("no")

    kept = model.model.layers[layer].output[0][-1].clone().save()
    raise Stubborn("stays")


@tracewire.intervention
def raises_several(model, tracer, live, layer):
    kept = [].save()

    def member(value):
        try:
            raise ValueError(value)
        except ValueError as error:
            mine = error
            return mine

    for _ in tracer.iter[:]:
        kept.append(model.model.layers[layer].output[0][-1].clone())
        raise ExceptionGroup("several", [member(kept[-1]), member(kept[-1])])


@tracewire.intervention
def raises_what_was_tampered_with(model, tracer, live, layer):
    class Dict(dict):
        def pop(self, *args):
            raise RuntimeError("no")

        get = pop

    kept = model.model.layers[layer].output[0][-1].clone().save()
    cause = ValueError("cause")
    cause.__intervention_tb__ = "no traceback"
    error = ValueError("tampered with")
    error.__dict__ = Dict()
    raise error from cause


@tracewire.intervention
def raises_with_a_traceback_of_its_own(model, tracer, live, layer):
    kept = model.model.layers[layer].output[0][-1].clone().save()
    error = ValueError("forged")
    error.__intervention_tb__ = "no traceback"
    raise error


@tracewire.intervention
def stops(model, tracer, live, layer):
    kept = [].save()
    for step in tracer.iter[:]:
        kept.append(model.model.layers[layer].output[0][-1].clone())
        if step == 2:
            tracer.stop()


@pytest.fixture(scope="module")
def runner() -> Iterator[Any]:
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    made: Any = _Runner(16)
    with mock.patch("tracewire_engine.worker.runner_parts.cached_tokenizer_from_config", return_value=None):
        made.load_model()
    yield made
    watchdog.limit_turns(0)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects() if type(thing) is torch.Tensor)


ENDINGS = [
    *(outruns, comes_to_its_end, raises, raises_of_another, raises_several, raises_what_looks_after_itself),
    *(raises_what_was_tampered_with, raises_with_a_traceback_of_its_own, stops),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_an_ended_block_leaves_no_tensor_to_a_garbage_collection(runner: Any, uncollected: None, ending: Any) -> None:
    block = ending(layer=LAYER).block()
    one_round(runner, block, 3, STEPS, 0)
    before = tensors()
    for number in range(1, 4):
        one_round(runner, block, 3, STEPS, number)
    # What the last step's report is made of is the runner's until the next one.
    assert tensors() - before < 3


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks' turns have a limit."""
    monkeypatch.setattr(watchdog, "_limit_s", 0.0)
    handler = signal.getsignal(signal.SIGALRM)
    watchdog.limit_turns(0.2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, handler)


# By a thread: the signal is the watchdog's.
@pytest.mark.timeout(60, method="thread")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_a_block_made_cannot_hold_the_engine_when_it_goes(runner: Any, limited: None) -> None:
    @tracewire.intervention
    def lingers(model, tracer, live, layer):
        class Lingering:
            def __del__(self):
                while True:
                    pass

        kept = model.model.layers[layer].output[0][-1].clone().save()
        held = Lingering()
        model.model.layers[layer].output[0]

    # Each looks that its requests were reported as finished.
    one_round(runner, lingers(layer=LAYER).block(), 2, STEPS, 0)
    one_round(runner, outruns(layer=LAYER).block(), 1, STEPS, 1)
