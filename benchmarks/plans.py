"""What a batch that changes costs declared interventions, without a model: processor time of worker and adapter.

    python -m benchmarks.plans [--requests 32] [--layers 1] [--way declared|steered|own] [--rounds 5] [--json]

A service's batch changes every few steps: a request ends, another one comes. The worker then makes a new plan, and the
adapter gets a new layout of the reads. Each request reads `--layers` layers of a made-up model (`declared`), or reads a
projection of them and steers, along a vector that all have (`steered`) or along one of its own (`own`). The values are
handed over on the CPU. The figures are microseconds of one thread for a step of all requests, medians over the steps
and then over the rounds: `same` of steps that are like the ones before, `changed` of steps before which one request has
gone and one has come.

- *plan*: the step is planned;
- *serve*: the plan reads and edits the values of its locations;
- *report*: the reads become one buffer, with its layout if that is new, and the report is encoded;
- *adapter*: one adapter decodes the layout and makes each request's delta.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.processes import at_least, show
from tests.support.vectors import by_reference
from tracewire_bus.domain.intervention_checks import normalize
from tracewire_bus.wire.messages import Declared, Probe, Steer
from tracewire_engine.adapter.read_decoder import ChoiceReads, ReadDecoder
from tracewire_engine.protocol.messages import Batch, Layout, Placed
from tracewire_engine.worker.blocks.live_params import LiveRun
from tracewire_engine.worker.declared.ops import Declaration
from tracewire_engine.worker.declared.plan import DeclaredRequests

HIDDEN, PROMPT = 2048, 16
#: How many steps of a round count; and how many come before them.
STEPS, BEFORE = 60, 8
WAYS = ("declared", "steered", "own")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Layout).decode


class Parts:
    """The processor time of each part of each step, in microseconds."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of a step."""
        began = time.thread_time_ns()
        yield
        self.took[name].append((time.thread_time_ns() - began) / 1000)


class Batches:
    """A worker's batch of requests and the adapter that follows it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.declared = DeclaredRequests(torch.device("cpu"))
        self.declared.decoded.vectors.folder = folder
        self._folder, self._layers, self._way = folder, options.layers, options.way
        self._encoded = self._interventions(0)
        rows = torch.randn(2, options.requests, HIDDEN, dtype=torch.bfloat16)
        self._values = (rows[0], rows[1])
        self.states: dict[str, Any] = {}
        self._readers: dict[str, ChoiceReads] = {}
        self._decoder = ReadDecoder()
        self._number = 0

    def _interventions(self, seed: int) -> bytes:
        placed = [
            Placed(by_reference(one, self._folder), [(f"layer.{layer}.output", True)], False)
            for layer in range(self._layers)
            for one in interventions(self._way, layer, seed)
        ]
        return msgspec.msgpack.encode(placed)

    def add(self) -> None:
        """A request comes."""
        name = f"r{self._number}"
        if self._way == "own":
            self._encoded = self._interventions(self._number)
        self._number += 1
        self.states[name] = SimpleNamespace(num_computed_tokens=PROMPT, num_prompt_tokens=PROMPT)
        self._readers[name] = ChoiceReads()
        self.declared.add(name, Declaration(name, 0, self._encoded, LiveRun(name), self.declared.decoded))

    def remove(self, name: str) -> None:
        """A request has ended."""
        del self.states[name], self._readers[name]
        self.declared.pop(name)

    @torch.inference_mode()
    def step(self, parts: Parts) -> None:
        """One step: each request generates a token."""
        names = list(self.states)
        with parts.part("plan"):
            self.declared.begin(names, dict.fromkeys(names, 1), len(names), self.states)
        with parts.part("serve"):
            for hook in self.declared.hooks.values():
                hook.run(self._values)
        with parts.part("report"):
            collected = self.declared.collect(lambda values: values)
            assert collected is not None
            layout, batch, flat = collected
            encoded = None if layout is None else _encode(layout)
            _encode(batch)
        with parts.part("adapter"):
            self._read(encoded, batch, memoryview(flat.numpy()))
        for state in self.states.values():
            state.num_computed_tokens += 1

    def _read(self, layout: bytes | None, batch: Batch, data: memoryview) -> None:
        if layout is not None:
            self._decoder.layout(_decode(layout))
        for reads, index in self._decoder.batch(batch):
            reader = self._readers[reads.request]
            reader.take(index, reads, data)
            if not reader.steps.pop(index):
                raise RuntimeError(f"{reads.request} has read nothing at token {index}")


def interventions(way: str, layer: int, seed: int) -> list[Declared]:
    """Those of a request at a layer, normalized."""
    if way == "declared":
        return normalize([Probe(f"h{layer}", "")])
    vector = np.random.default_rng((seed, layer)).standard_normal(HIDDEN).astype(np.float32)
    return normalize([Probe(f"p{layer}", "", weight=vector), Steer("", vector, scale=0.5)])


def play(options: argparse.Namespace, *, changing: bool) -> dict[str, float]:
    """The medians of the parts over the steps of one round."""
    with tempfile.TemporaryDirectory() as folder:
        batches, parts = Batches(options, Path(folder)), Parts()
        for _ in range(options.requests):
            batches.add()
        gc.collect()
        for number in range(BEFORE + STEPS):
            if number == BEFORE:
                parts = Parts()
            if changing:
                batches.remove(list(batches.states)[options.requests // 2])
                batches.add()
            batches.step(parts)
    return {name: median(took) for name, took in parts.took.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of steps in turns."""
    torch.set_num_threads(1)
    rounds: dict[str, list[dict[str, float]]] = {"same": [], "changed": []}
    for _ in range(options.rounds):
        for name, found in rounds.items():
            found.append(play(options, changing=name == "changed"))
    return {
        "requests": options.requests,
        "layers": options.layers,
        "way": options.way,
        **{
            f"{name}_us": {part: round(median(one[part] for one in found)) for part in found[0]}
            for name, found in rounds.items()
        },
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=at_least(2), default=32)
    parser.add_argument("--layers", type=at_least(1), default=1)
    parser.add_argument("--way", choices=WAYS, default="declared")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    show(measure(options), as_json=options.json)


if __name__ == "__main__":
    main()
