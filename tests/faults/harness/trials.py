"""Breaks things while traces run, and checks that nothing is lost.

    python -m tests.faults.harness [--trials N] [--fault NAME ...] [--seed S] [--lanes N] [--json]

A trial is a load of some tens of traces with several consumers each, during which one fault happens at a random moment;
`faults.py` lists the faults, `checker.py` says what must hold. Everything random in a trial comes from its seed, which
is told when something was found: `--fault NAME --seed S --trials 1` draws the same again (when things happen is the
machine's, so it may take some trials to see it again).

With `--json` the last line is one object: `trials`, `violations`, `by_fault`, and how long recoveries took.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio

from tests.faults.harness.checker import Violation
from tests.faults.harness.faults import FAULTS, LEASE_S, Fault, KillRedis
from tests.faults.harness.load import Load
from tests.faults.harness.processes import Nursery, nursery
from tests.faults.harness.stage import Stage, stage

__all__ = ["Tally", "main", "run", "summary"]

#: How long a trial may take until what has not ended by then never will, in seconds.
TRIAL_S = 90.0


@dataclass
class Tally:
    """What came of the trials of one fault."""

    trials: int = 0
    violations: list[tuple[int, Violation]] = field(default_factory=list)
    traces: int = 0
    events: int = 0
    restarts: int = 0
    done: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    #: In seconds: from the loss of an engine to the first output of a trace's next attempt; from Redis being back to
    #: the first event that a consumer got.
    recovered: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)


async def trial(on: Stage, fault: Fault, seed: int, tally: Tally) -> list[Violation]:
    """One trial. Returns what was wrong."""
    random = Random(seed)
    load = Load(on, random, f"t{seed}", traces=fault.traces, tokens=fault.tokens)
    on.marks.clear()
    await on.staff(fault.engines)
    found: list[Violation] = []
    with anyio.move_on_after(TRIAL_S) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(load.run)
            group.start_soon(fault.act, on, load, random)
    if scope.cancelled_caught:
        found.append(Violation("no final", load.name, f"the load has not ended after {TRIAL_S:g} s"))
    found += await load.check()
    found += await on.leftovers([*load.asked])
    found += on.deserted()
    for line in (*on.engine_wires, *on.client_wires):
        on.done["cuts"] += line.cut_through
        line.cut_through = 0
    tally.done += on.done
    on.done.clear()
    tally.traces += len(load.asked)
    tally.events += sum(len(entries) for consumers in load.got.values() for entries in consumers.values())
    tally.restarts += load.restarts
    if "engine lost" in on.marks:
        tally.recovered += load.recovered(on.marks["engine lost"])
    if "redis back" in on.marks and (first := load.first_event(on.marks["redis back"])) is not None:
        tally.returned.append(first)
    return found


async def run_fault(fault: Fault, seeds: Sequence[int], folder: Path, births: Nursery, tally: Tally) -> None:
    """The trials of one fault, on one stage; on a new one after something was found."""
    left = list(seeds)
    options = (
        *("--lease", str(LEASE_S), "--patience", "0.6", "--certain", "2", "--drain", "0.5"),
        *("--rate", str(fault.rate), "--capacity", str(fault.capacity), *fault.options),
    )
    while left:
        own = Path(tempfile.mkdtemp(prefix="s", dir=folder))
        async with stage(own, births, Random(left[0]), backend=fault.backend, options=options, wired=fault.wired) as on:
            for _ in range(min(fault.lasts, len(left))):
                seed = left.pop(0)
                began = time.monotonic()
                found = await trial(on, fault, seed, tally)
                tally.trials += 1
                tally.seconds += time.monotonic() - began
                tally.violations += [(seed, violation) for violation in found]
                if found:
                    again = f'--fault "{fault.name}" --seed {seed} --trials 1'
                    print(f"{fault.name}: {len(found)} violations in the trial of {again}", file=sys.stderr)
                    for violation in found[:8]:
                        print(f"    {violation}", file=sys.stderr, flush=True)
                    break


class Recovery(Fault):
    """What recovery times are measured with: longer traces, engines as they are by default."""

    engines = 2
    settings = KillRedis.settings
    traces = (20, 30)
    tokens = (80, 140)
    rate = 40


async def recover(count: int, seed: int) -> dict[str, Any]:
    """Measure `count` recoveries of each kind, with the adapter's own leases."""
    times: dict[str, list[float]] = {"adapter killed": [], "engine died": [], "redis back": []}
    fault = Recovery()
    options = ("--lease", "5", "--rate", str(fault.rate), "--capacity", str(fault.capacity))
    with tempfile.TemporaryDirectory(prefix="tracewire-faults-") as folder:
        async with nursery(Path(folder)) as births, anyio.create_task_group() as group:

            async def measure(kind: str) -> None:
                own = Path(tempfile.mkdtemp(prefix="s", dir=folder))
                async with stage(own, births, Random(seed), backend=fault.backend, options=options, wired=False) as on:
                    for number in range(count):
                        await on.staff(fault.engines)
                        oldest = on.alive()[0]
                        # Whoever has just begun to look is not sure of what it misses, and waits longer.
                        await anyio.sleep(max(0.0, oldest.since + 9 - time.monotonic()))
                        random = Random(seed + number)
                        load = Load(on, random, f"r{number}", traces=fault.traces, tokens=fault.tokens)
                        async with anyio.create_task_group() as trial:
                            trial.start_soon(load.run)
                            await load.begun.wait()
                            await anyio.sleep(random.uniform(1.0, 1.6))
                            if kind == "redis back":
                                on.server.kill()
                                await anyio.sleep(random.uniform(0.0, 2.0))
                                await on.server.start()
                                on.mark(kind)
                            else:
                                number_ = signal.SIGKILL if kind == "adapter killed" else signal.SIGUSR1
                                await on.end(on.alive()[-1], number_)
                        assert not await load.check()
                        if kind == "redis back":
                            first = load.first_event(on.marks[kind])
                            times[kind] += [] if first is None else [first]
                        else:
                            times[kind] += load.recovered(on.marks["engine lost"])

            for kind in times:
                group.start_soon(measure, kind)
    return {kind: _times(found) for kind, found in times.items()}


async def run(names: Sequence[str], trials: int, seed: int, lanes: int = 2) -> dict[str, Tally]:
    """`trials` trials, in turns of the faults of these names."""
    tallies = {name: Tally() for name in names}
    waiting = [
        (name, [seed + number for number in range(place, trials, len(names))]) for place, name in enumerate(names)
    ]
    with tempfile.TemporaryDirectory(prefix="tracewire-faults-") as folder:
        async with nursery(Path(folder)) as births, anyio.create_task_group() as group:

            async def lane() -> None:
                while waiting:
                    name, seeds = waiting.pop(0)
                    await run_fault(FAULTS[name](), seeds, Path(folder), births, tallies[name])
                    print(_line(name, tallies[name]), file=sys.stderr, flush=True)

            for _ in range(lanes):
                group.start_soon(lane)
    return tallies


def _line(name: str, tally: Tally) -> str:
    kinds = Counter(violation.kind for _, violation in tally.violations)
    wrong = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no violation"
    return (
        f"{name:20} {tally.trials:4} trials, {tally.traces:6} traces, {tally.restarts:5} restarts, "
        f"{tally.seconds / max(1, tally.trials):5.1f} s each: {wrong}"
    )


def _times(seconds: list[float]) -> dict[str, Any] | None:
    if not seconds:
        return None
    return {
        "count": len(seconds),
        "p50_s": round(statistics.median(seconds), 3),
        "max_s": round(max(seconds), 3),
    }


def summary(tallies: dict[str, Tally]) -> dict[str, Any]:
    """What the last line says."""
    by_fault: dict[str, Any] = {}
    for name, tally in tallies.items():
        said: dict[str, Any] = {
            "trials": tally.trials,
            "violations": len(tally.violations),
            "traces": tally.traces,
            "events": tally.events,
            "restarts": tally.restarts,
            "done": tally.done,
        }
        if tally.violations:
            said["kinds"] = Counter(violation.kind for _, violation in tally.violations)
            said["seeds"] = sorted({seed for seed, _ in tally.violations})
        if tally.recovered:
            said["engine_loss_to_output"] = _times(tally.recovered)
        if tally.returned:
            said["redis_back_to_event"] = _times(tally.returned)
        by_fault[name] = said
    return {
        "trials": sum(tally.trials for tally in tallies.values()),
        "violations": sum(len(tally.violations) for tally in tallies.values()),
        "by_fault": by_fault,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="in all, in turns of the faults")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="how many faults at once, each on a stage of its own")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--recovery", type=int, metavar="N", help="measure N recoveries of each kind instead, with leases as by default"
    )
    options = parser.parse_args()
    if options.recovery:
        print(json.dumps(anyio.run(recover, options.recovery, options.seed)))
        return 0
    tallies = anyio.run(run, options.fault or list(FAULTS), options.trials, options.seed, options.lanes)
    said = summary(tallies)
    if options.json:
        print(json.dumps(said))
    else:
        print(f"{said['trials']} trials, {said['violations']} violations")
    return 1 if said["violations"] else 0
