"""What blocks in hosts cost the model's thread, without a model.

    python -m benchmarks.host_steps [--ways reads writes] [--traces 32] [--hosts 1 2] [--hidden 4] [--operations 300]
        [--steps 300] [--rounds 5] [--parts 0] [--json]

A worker's part for `tracewire engine --blocks host` runs in this process, beside a made-up model whose step takes the
time of so many small operations of PyTorch. 300 of them take some two milliseconds, as a step of a small model on a GPU
does on its core. The save relay is a process, as in an engine, and this process is the adapter: it reads what has come
between the rounds. Each trace reads one layer in each step, or scales it and reads it (`writes`). All traces are of one
tenant. Steps with and without them take turns, in rounds.

By the way, the number of traces, and how many hosts they share at most:

- `to_plain` is the median over the rounds of steps a second with the blocks, relative to steps without them in the same
  round, and `least` and `most` are those of single rounds;
- `quick_to_plain` is the same of the quickest tenth of the steps, which other programs have disturbed least;
- `thread_ms` is the processor time that a step takes more on the model's thread, in milliseconds, median;
- `worker_ms` is the same of all threads of the worker's process;
- `host_ms` is the processor time that a step takes in all hosts together, and `hosts` is how many they are;
- `parts`, with `--parts N`: the N parts of the model's thread that take most in the last round, in microseconds a step.
  Counting them slows the thread down.

Where other programs share the cores, `to_plain` says little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.hosts import READS
from benchmarks.processes import at_least, show
from benchmarks.thread_account import ThreadAccount
from tests.support import hosted_model
from tests.support.hosted_model import HostedModel
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.worker.block_host.gathered_reports import GatheredReports
from tracewire_engine.worker.block_host.host import BlockHost, LateTurn
from tracewire_engine.worker.block_host.host_turns import HostTurns
from tracewire_engine.worker.block_host.hosted_blocks import HostedBlocks
from tracewire_engine.worker.block_host.report_thread import ReportThread
from tracewire_engine.worker.block_host.rows import SharedRows
from tracewire_engine.worker.block_host.staged_step import HostRows, HostShare, StagedStep
from tracewire_engine.worker.block_host.untrusted_reports import UntrustedReports

WRITES = """
kept = [].save()
for _ in tracer.iter[:]:
    hidden = model.model.layers[1].output[0]
    hidden[:] *= 1.01
    kept.append(hidden[-1].clone())
"""

WAYS = {"reads": READS, "writes": WRITES}

#: Of which parts of the model's thread there is an account.
PARTS: dict[type, str] = {
    HostedBlocks: "begin reach end",
    HostTurns: "share_with give ask send _reply",
    BlockHost: "begin read end send",
    LateTurn: "send",
    StagedStep: "__init__ reach _stage",
    HostShare: "parts give",
    HostRows: "arrive",
    SharedRows: "__init__ check_edits replace",
    ReportThread: "between_steps _read _pass_on _send_late",
    GatheredReports: "add send",
    UntrustedReports: "check",
    HostChannel: "send _flush _take",
}


def _compute(operations: int) -> None:
    values = torch.zeros(32, 64)
    for _ in range(operations):
        values = torch.tanh(values)


class _Timed:
    """The times of so many steps, in milliseconds.

    Attributes:
        mean: of a step.
        quick: of the longest of the quickest tenth of them.
        busy: the processor time of this thread in a step.
        used: that of all threads.
    """

    def __init__(self, steps: int, one: Callable[[int], None]) -> None:
        busy, used, took = time.thread_time(), time.process_time(), []
        for number in range(1, steps + 1):
            began = time.perf_counter()
            one(number)
            took.append((time.perf_counter() - began) * 1000)
        self.busy = (time.thread_time() - busy) * 1000 / steps
        self.used = (time.process_time() - used) * 1000 / steps
        self.mean, self.quick = sum(took) / steps, sorted(took)[steps // 10]


def _busy_s(processes: Iterable[psutil.Process]) -> float:
    return sum([sum(process.cpu_times()[:2]) for process in processes])


def measure(
    way: str, traces: int, hosts: int, options: argparse.Namespace, account: ThreadAccount | None
) -> dict[str, Any]:
    """The figures of so many traces that share so many hosts."""
    model, block, steps = HostedModel(most_hosts=hosts, adapter_link=True), WAYS[way], options.steps

    def step(names: list[str], number: int) -> None:
        model.step(dict.fromkeys(names, 1), number)
        _compute(options.operations)

    # The process that forks the hosts starts with its first host.
    model.run({"first": block}, steps=1)
    ratios, quick, more, worker, busy, used = [], [], [], [], [], 0
    for round_ in range(options.rounds):
        names = [f"{round_}.{trace}" for trace in range(traces)]
        plain = _Timed(steps, lambda number, names=names: step(names, number))
        for name in names:
            model.open(name, block)
        model.step(dict.fromkeys(names, 2), 0)
        for name in names:
            model.wait_for_step(name)
        processes = [psutil.Process(pid) for pid in {one.host.process.pid for one in model.hosts.traces.values()}]
        used, before = len(processes), _busy_s(processes)
        if account is not None:
            account.reset()
        hosted = _Timed(steps, lambda number, names=names: step(names, number))
        for name in names:
            model.wait_for_step(name, steps=steps + 1)
        busy.append((_busy_s(processes) - before) * 1000 / steps)
        for name in names:
            model.finish(name, steps + 1)
        model.wait(*names)
        assert all(len(model.outcomes[name].saves["kept"]) == steps + 1 for name in names)
        ratios.append(plain.mean / hosted.mean)
        quick.append(plain.quick / hosted.quick)
        more.append(max(0.0, hosted.busy - plain.busy))
        worker.append(max(0.0, hosted.used - plain.used))
    model.close()
    found: dict[str, Any] = {
        "to_plain": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "quick_to_plain": round(median(quick), 3),
        "thread_ms": round(median(more), 3),
        "worker_ms": round(median(worker), 3),
        "host_ms": round(median(busy), 3),
        "hosts": used,
    }
    if account is not None:
        found["parts"] = account.most(options.parts, steps)
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--traces", type=at_least(1), nargs="+", default=[32])
    parser.add_argument("--hosts", type=at_least(1), nargs="+", default=[1, 2], help="that the traces share at most")
    parser.add_argument("--hidden", type=at_least(1), default=hosted_model.HIDDEN, help="numbers in a row of a layer")
    parser.add_argument("--operations", type=at_least(1), default=300, help="of a step")
    parser.add_argument("--steps", type=at_least(1), default=300, help="of a round")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--parts", type=at_least(0), default=0, help="of the model's thread that are listed")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hosted_model.HIDDEN = options.hidden
    account = None
    if options.parts:
        account = ThreadAccount([(owner, name) for owner, names in PARTS.items() for name in names.split()])
    with torch.inference_mode():
        found: dict[str, Any] = {
            f"{way}, {traces}, {hosts}": measure(way, traces, hosts, options, account)
            for way in options.ways
            for traces in options.traces
            for hosts in options.hosts
        }
    show(found, as_json=options.json, width=20)


if __name__ == "__main__":
    main()
