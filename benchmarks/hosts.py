"""What processes for blocks cost, with many tenants and without a model: start-up, memory, steps, reuse and eviction.

    python -m benchmarks.hosts [--tenants 100] [--traces 1] [--steps 20] [--json]

A worker's part for `tracewire engine --blocks host` runs in this process, beside a made-up model of three layers. Each
tenant runs some traces that read one layer in each step, all tenants in one batch. The figures:

- `open_ms`: how long the model waits for a new trace, in milliseconds: its tenant's first trace, which needs a host,
  and a later one, which finds the host;
- `host_mb`: memory that a host has for itself, and `shared_mb`: what it shares with the others, in megabytes;
- `step_ms`: a step of all traces on the model's thread, in milliseconds, median;
- `hosts_running`: how many hosts there are while all traces run; `hosts_kept`: when they are over;
- `hosts_reused`: how many of the kept ones the next traces of the same tenants find.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import psutil

from benchmarks.processes import at_least, show
from tests.support.hosted_model import HostedModel
from tracewire_engine.worker.block_host.report_thread import IDLE

READS = """
kept = [].save()
for _ in tracer.iter[:]:
    kept.append(model.model.layers[1].output[0][-1].clone())
"""


def _opened(model: HostedModel, name: str, tenant: str) -> float:
    before = time.perf_counter()
    model.open(name, READS, tenant=tenant)
    return (time.perf_counter() - before) * 1000


def _hosts(model: HostedModel) -> list[psutil.Process]:
    found = {trace.host.process.pid for trace in model.hosts.traces.values()}
    return [psutil.Process(pid) for pid in found]


def measure(tenants: int, traces: int, steps: int) -> dict[str, Any]:
    """The figures."""
    model = HostedModel()
    # The process that forks the hosts starts with its first host.
    model.run({"first": READS}, steps=1)
    opened = {
        f"{tenant}.{trace}": _opened(model, f"{tenant}.{trace}", f"tenant{tenant}")
        for trace in range(traces)
        for tenant in range(tenants)
    }
    took = []
    for index in range(steps):
        before = time.perf_counter()
        model.step(dict.fromkeys(opened, 1 if index else 2), index)
        took.append((time.perf_counter() - before) * 1000)
        # In the pace in which the hosts follow, as a model's steps take time.
        for name in opened:
            model.wait_for_step(name, steps=index + 1)
    hosts = _hosts(model)
    sizes = [host.memory_full_info() for host in hosts]
    for name in opened:
        model.finish(name, steps)
    model.wait(*opened)
    # The thread of reports ends hosts before it waits for its next job.
    model.wait()
    left = len(psutil.wait_procs(hosts, timeout=2)[1])
    again = {str(tenant): _opened(model, f"again.{tenant}", f"tenant{tenant}") for tenant in range(tenants)}
    kept = {host.pid for host in hosts} & {host.pid for host in _hosts(model)}
    names = [f"again.{tenant}" for tenant in again]
    model.step(dict.fromkeys(names, 2), 0)
    for name in names:
        model.finish(name, 1)
    model.wait(*names)
    first = [took_ms for name, took_ms in opened.items() if name.endswith(".0")]
    figures = {
        "tenants": tenants,
        "traces": len(opened),
        "open_ms": {"first": round(median(first), 2), "first_most": round(max(first), 2)},
        "host_mb": round(median(one.uss for one in sizes) / 1e6, 1),
        "shared_mb": round(median(one.rss - one.uss for one in sizes) / 1e6, 1),
        "step_ms": round(median(took[1:]), 2),
        "hosts_running": len(hosts),
        "hosts_kept": left,
        "hosts_kept_at_most": IDLE,
        "hosts_reused": len(kept),
    }
    if traces > 1:
        later = [took_ms for name, took_ms in opened.items() if not name.endswith(".0")]
        figures["open_ms"]["later"] = round(median(later), 2)
    model.close()
    return figures


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenants", type=at_least(1), default=100)
    parser.add_argument("--traces", type=at_least(1), default=2, help="of each tenant")
    parser.add_argument("--steps", type=at_least(2), default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    show(measure(options.tenants, options.traces, options.steps), as_json=options.json, width=20)


if __name__ == "__main__":
    main()
