"""What blocks that read cost the model's thread when they run in hosts, without a model.

    python -m benchmarks.host_steps [--traces 32] [--hosts 1 2] [--operations 300] [--steps 300] [--rounds 5] [--json]

A worker's part for `tracewire engine --blocks host` runs in this process, beside a made-up model whose step takes the
time of so many small operations of PyTorch. 300 of them take some two milliseconds, as a step of a small model on a GPU
does on its core. Each trace reads one layer in each step. Steps with and without the traces take turns, in rounds.

By the number of hosts that the traces share:

- `to_plain` is the median over the rounds of steps a second with the blocks, relative to steps without them in the same
  round, and `least` and `most` are those of single rounds;
- `thread_ms` is the processor time that a step takes more on the model's thread, in milliseconds, median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.hosts import READS
from benchmarks.processes import at_least, show
from tests.support.hosted_model import HostedModel


def _compute(operations: int) -> None:
    values = torch.zeros(32, 64)
    for _ in range(operations):
        values = torch.tanh(values)


def _timed(steps: int, one: Callable[[int], None]) -> tuple[float, float]:
    """Milliseconds of a step, and of the processor time in it of this thread."""
    began, busy = time.perf_counter(), time.thread_time()
    for number in range(1, steps + 1):
        one(number)
    return (time.perf_counter() - began) * 1000 / steps, (time.thread_time() - busy) * 1000 / steps


def measure(hosts: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of traces that share so many hosts."""
    model = HostedModel(most_hosts=hosts)

    def step(names: list[str], number: int) -> None:
        model.step(dict.fromkeys(names, 1), number)
        _compute(options.operations)

    # The process that forks the hosts starts with its first host.
    model.run({"first": READS}, steps=1)
    ratios, more = [], []
    for round_ in range(options.rounds):
        names = [f"{round_}.{trace}" for trace in range(options.traces)]
        plain, plain_busy = _timed(options.steps, lambda number, names=names: step(names, number))
        for name in names:
            model.open(name, READS)
        model.step(dict.fromkeys(names, 2), 0)
        for name in names:
            model.wait_for_step(name)
        hosted, hosted_busy = _timed(options.steps, lambda number, names=names: step(names, number))
        for name in names:
            model.finish(name, options.steps + 1)
        model.wait(*names)
        assert all(len(model.outcomes[name].saves["kept"]) == options.steps + 1 for name in names)
        ratios.append(plain / hosted)
        more.append(max(0.0, hosted_busy - plain_busy))
    model.close()
    return {
        "to_plain": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "thread_ms": round(median(more), 3),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=at_least(1), default=32)
    parser.add_argument("--hosts", type=at_least(1), nargs="+", default=[1, 2], help="that the traces share at most")
    parser.add_argument("--operations", type=at_least(1), default=300, help="of a step")
    parser.add_argument("--steps", type=at_least(1), default=300, help="of a round")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found: dict[str, Any] = {str(hosts): measure(hosts, options) for hosts in options.hosts}
    show(found, as_json=options.json, width=20)


if __name__ == "__main__":
    main()
