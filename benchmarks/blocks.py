"""What blocks cost the model's thread, without a model: Python time of a step and of an end, part by part.

    python -m benchmarks.blocks [--requests 32] [--tokens 128] [--hidden 1024] [--rounds 5] [--json]

Tracewire's runner goes through its steps over a made-up model and a made-up scheduler, on the CPU: each request has a
block that saves the last position of one layer, each step, as `benchmarks.overhead` has it. The layer's output is
handed over as a tap of a replayed CUDA graph does. What is left out is the model, and everything in other processes.

The parts, in microseconds of a step of all requests (medians over the steps, then over the rounds):

- *scope*: requests and their rows are told to the blocks;
- *tap*: the blocks are served, with their own Python (a clone each);
- *passed*: the other locations of an eager model of 8 layers, 288 in all, are come by; a replayed graph has none;
- *report*: what they newly saved is found, copied to the host, encoded and handed to the link.

*end* is the step after the last, in which all requests end at once: microseconds of each request.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import tracewire_engine  # noqa: F401
from benchmarks.overhead import last
from benchmarks.processes import at_least, show
from tracewire_bus.wire.messages import Block
from tracewire_engine.protocol.keys import BLOCK_ARG, BLOCK_TIMEOUT
from tracewire_engine.protocol.messages import Report
from tracewire_engine.worker.first_runner import FirstRunner

LAYER, LAYERS = 2, 4
TAP = f"model.model.layers.{LAYER}.output"

#: What an eager model of 8 layers comes by, besides.
PASSED = [
    f"model.model.layers.{layer}.module{module}.{side}"
    for layer in range(8)
    for module in range(12)
    for side in ("input", "skip", "output")
]


class _Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(LAYERS)])


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = _Inner()


class _Times:
    """Microseconds by part, of each step."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)
        self._last = 0.0

    def start(self) -> None:
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self.found[part].append(1e6 * (now - self._last))
        self._last = now


class _PlatformRunner(GPUModelRunner):
    """Stands where vLLM's runner does: its steps hand one layer's output over and sample nothing."""

    def __init__(self, hidden: int) -> None:
        self.module = _Model()
        self.device = torch.device("cpu")
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.execute_model_state: Any = None
        layers = SimpleNamespace(num_hidden_layers=LAYERS)
        self.model_config = SimpleNamespace(hf_text_config=layers, get_vocab_size=lambda: 128_256)
        self.vllm_config = SimpleNamespace(
            additional_config={BLOCK_TIMEOUT: 10.0}, parallel_config=SimpleNamespace(pipeline_parallel_size=1)
        )
        self.times = _Times()
        self.hidden = hidden

    def load_model(self) -> None:
        pass

    def get_model(self) -> torch.nn.Module:
        return self.module

    def _update_states(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            del self.requests[name]
            self.input_batch.req_ids.remove(name)
        for data in scheduler_output.scheduled_new_reqs:
            self.requests[data.req_id] = SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=16)
            self.input_batch.req_ids.append(data.req_id)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        total = scheduler_output.total_num_scheduled_tokens
        # As the layer has it: what it adds to the residual stream, and the stream. A graph's rows are padded.
        live = (torch.randn(total + 8, self.hidden), torch.randn(total + 8, self.hidden))
        self.times.start()
        self._update_states(scheduler_output)
        self.times.mark("scope")
        if total:
            self.nnsight_model.interleaver.replay(TAP, live)
            self.times.mark("tap")
            handle = self.nnsight_model.interleaver.handle
            for location in PASSED:
                handle(location, live)
            self.times.mark("passed")
        for name, count in scheduler_output.num_scheduled_tokens.items():
            self.requests[name].num_computed_tokens += count
        self.execute_model_state = object()
        self.times.start()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> None:
        self.execute_model_state = None


class _Runner(FirstRunner, _PlatformRunner):
    """Tracewire's runner over the one above."""


class _Link:
    """Encodes as the link does, and keeps the last report."""

    def __init__(self) -> None:
        self.finished = 0
        self._buffer = bytearray()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: Report) -> None:
        self._encoder.encode_into(report, self._buffer)
        self.finished += len(report.finishes)


def _scheduled(counts: dict[str, int], fresh: list[Any], finished: set[str]) -> Any:
    return SimpleNamespace(
        finished_req_ids=finished,
        scheduled_new_reqs=fresh,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
    )


def one_round(runner: Any, block: Block, requests: int, tokens: int, number: int) -> dict[str, float]:
    """All requests from their first step to their end; microseconds by part."""
    link = runner.tracewire_reporter.link = _Link()
    times = runner.times = _Times()
    encoded = msgspec.msgpack.encode(block)
    names = [f"{number}x{index}-{index:08x}" for index in range(requests)]
    extra = {BLOCK_ARG: encoded}
    fresh = [SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra)) for name in names]
    found: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        for step in range(tokens):
            counts = dict.fromkeys(names, 16 if step == 0 else 1)
            runner.execute_model(_scheduled(counts, [] if step else fresh, set()))
            times.mark("unflatten")
            runner.sample_tokens()
            times.mark("report")
        for part, values in times.found.items():
            found[part] = values[1:]
        began = time.perf_counter()
        runner.execute_model(_scheduled({}, [], set(names)))
        runner.tracewire_reporter.send(wait=True)
        ended = time.perf_counter() - began
    assert link.finished == requests, "not all requests were reported as finished"
    return {
        **{part: median(values) for part, values in found.items()},
        "step": sum(median(values) for values in found.values()),
        "end": 1e6 * ended / requests,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=at_least(1), default=32)
    parser.add_argument("--tokens", type=at_least(2), default=128)
    parser.add_argument("--hidden", type=at_least(1), default=1024)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    _set_torch_accelerator_to_noop()
    torch.set_num_threads(1)
    runner: Any = _Runner(options.hidden)
    with mock.patch("tracewire_engine.worker.runner_parts.cached_tokenizer_from_config", return_value=None):
        runner.load_model()
    block = last(layers=[LAYER]).block()
    # As the worker does.
    gc.collect()
    gc.freeze()
    rounds = [
        one_round(runner, block, options.requests, options.tokens, number) for number in range(options.rounds + 1)
    ]
    figures = {part: round(median(one[part] for one in rounds[1:]), 1) for part in rounds[0]}
    show(figures, as_json=options.json)


if __name__ == "__main__":
    main()
