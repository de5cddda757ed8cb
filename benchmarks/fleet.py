"""A fleet of engines on one bus: `python -m benchmarks.fleet [--json]`.

Adapters, clients and Redis are real and processes of their own; behind each adapter stands a scripted engine
(`tests/support/scripted_engine.py`), which puts out tokens at a fixed pace. Three phases, on one Redis:

- *burst*: as many traces as half of the fleet could run, submitted at once to idle engines.
- *steady*: traces arrive at random, at 0.6 of what the fleet can serve, and nothing happens to it.
- *changing*: as many more arrive likewise while engines join, are drained (`client.drain`) and are killed (SIGKILL).

Of each is printed how many traces each engine accepted, in all and for each second that it took any, and the time from
before the submission to when the engine that took a trace first had accepted it. Every trace's stream is checked
(`tests/faults/harness/checker.py`): exactly one final, nothing lost, nothing twice, the tokens and values that its
prompt asks for. The exit status is 1 if anything was found.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import anyio

import tracewire
from benchmarks.quantiles import quantile
from tests.faults.harness.checker import Asked, Violation, check_trace
from tests.faults.harness.processes import Child, Nursery, RedisServer, nursery
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.bus import Bus
from tracewire_bus.wire.codec import decode_event
from tracewire_bus.wire.messages import Accepted

__all__ = ["Phase", "Shape", "run"]


@dataclass(frozen=True)
class Shape:
    """What is run. Times in seconds; `capacity` is in traces and `pace` in tokens a second of each."""

    traces: int = 2000
    steady: int = 500
    engines: int = 4
    models: int = 1
    capacity: int = 8
    pace: float = 25.0
    tokens: tuple[int, int] = (8, 24)
    load: float = 0.6
    #: How often an engine joins, one is drained, another joins, and one is killed.
    rounds: int = 3
    #: An engine's own, unless a test is in a hurry.
    lease: float = 5.0
    patience: float = 3.0
    certain: float = 8.0
    clients: int = 4
    seed: int = 1
    #: How long what was submitted last may take.
    settle: float = 120.0


@dataclass
class Phase:
    """What came of one phase. Times in milliseconds; `seconds` and the rates are of wall time."""

    name: str
    traces: int
    seconds: float
    finished: int
    attempts: int
    accept_p50: float
    accept_p99: float
    accept_max: float
    #: By engine: traces accepted, seconds in which it took any, and how it left, if it did.
    engines: dict[str, tuple[int, float, str]]
    #: Standard deviation over mean, of what the engines accepted a second.
    unevenness: float
    violations: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


@dataclass
class _Engine:
    name: str
    model: str
    child: Child
    since: float
    until: float | None = None
    how: str = ""


class _Fleet:
    """The engines, and what becomes of them."""

    def __init__(self, shape: Shape, started: Nursery, url: str, bus: Bus, client: Client) -> None:
        self.shape = shape
        self.engines: dict[str, _Engine] = {}
        self.said: list[str] = []
        self._nursery = started
        self._url = url
        self._bus = bus
        self._client = client
        self._count = 0
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:.1f} s: {text}")

    def taking(self, model: str | None = None) -> list[_Engine]:
        return [one for one in self.engines.values() if one.until is None and model in (None, one.model)]

    async def join(self, model: str) -> None:
        shape, name = self.shape, f"engine-{self._count}"
        self._count += 1
        child = await self._nursery.start(
            *("engine", "--url", self._url, "--engine", name, "--model", model, "--capacity", str(shape.capacity)),
            *("--rate", str(shape.pace), "--lease", str(shape.lease)),
            *("--patience", str(shape.patience), "--certain", str(shape.certain)),
        )
        with anyio.fail_after(60):
            while name not in await self._bus.registry.alive(name):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        self.engines[name] = _Engine(name, model, child, time.monotonic())
        self.say(f"{name} has joined")

    async def drain(self, model: str, random: Random) -> None:
        engine = random.choice(self.taking(model))
        engine.until, engine.how = time.monotonic(), "drained"
        self.say(f"{engine.name} is asked to drain")
        draining = await self._client.engines.drain(engine.name)
        await draining.wait()
        with anyio.fail_after(60):
            await engine.child.ended.wait()
        if engine.child.status != 0:
            raise RuntimeError(f"{engine.name} ended with {engine.child.status} when it was drained")
        self.say(f"{engine.name} has left")

    async def kill(self, model: str, random: Random) -> None:
        engine = random.choice(self.taking(model))
        engine.until, engine.how = time.monotonic(), "killed"
        self.say(f"{engine.name} is killed")
        await engine.child.kill()

    async def change(self, over_s: float, random: Random) -> None:
        """Rounds of joining, draining, joining and killing, evenly over this time."""
        plan = ["join", "drain", "join", "kill"] * self.shape.rounds
        pause = over_s / (len(plan) + 1)
        async with anyio.create_task_group() as leaving:
            for number, what in enumerate(plan):
                await anyio.sleep(pause)
                model = _model(number // 2 % self.shape.models)
                if what == "join":
                    await self.join(model)
                elif what == "drain":
                    # It takes as long as what the engine runs.
                    leaving.start_soon(self.drain, model, random)
                else:
                    await self.kill(model, random)


def _model(number: int) -> str:
    return f"model-{number}"


class _Load:
    """The traces of one phase."""

    def __init__(self, name: str, shape: Shape, clients: Sequence[Client], random: Random) -> None:
        self.name = name
        self.shape = shape
        self.asked: dict[str, Asked] = {}
        self.models: dict[str, str] = {}
        self.submitted: dict[str, float] = {}
        self._clients = clients
        self._random = random

    def rate(self) -> float:
        """Arrivals a second."""
        shape = self.shape
        return shape.load * shape.engines * shape.capacity * shape.pace / statistics.mean(shape.tokens)

    async def submit(self, count: int, *, at_once: bool = False) -> None:
        """Submit so many, one after another at random times."""
        async with anyio.create_task_group() as group:
            for number in range(count):
                if not at_once:
                    await anyio.sleep(self._random.expovariate(self.rate()))
                asked = Asked(
                    f"{self.name}-{number}",
                    f"prompt {self._random.randrange(1000)}",
                    self._random.randint(*self.shape.tokens),
                )
                self.asked[asked.trace] = asked
                self.models[asked.trace] = _model(number % self.shape.models)
                group.start_soon(self._submit, asked, self._clients[number % len(self._clients)])

    async def _submit(self, asked: Asked, client: Client) -> None:
        trace = client.trace(
            self.models[asked.trace], asked.prompt, acts, max_tokens=asked.tokens, detach=True, trace_id=asked.trace
        )
        self.submitted[asked.trace] = time.time()
        await trace.start()
        await trace.aclose()


class _Ends:
    """Counts the ends that the bus tells of."""

    def __init__(self, client: Client) -> None:
        self.finals: Counter[str] = Counter()
        self._client = client
        self._changed = anyio.Event()

    async def watch(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self._client.watch() as watch:
            task_status.started()
            async for event in watch:
                if event.type == "final":
                    self.finals[event.trace_id] += 1
                    self._changed.set()
                    self._changed = anyio.Event()

    async def all_of(self, traces: dict[str, Asked], within_s: float) -> bool:
        """Wait until each has one; whether they do, in this time."""
        with anyio.move_on_after(within_s):
            while not self.finals.keys() >= traces.keys():
                await self._changed.wait()
        return self.finals.keys() >= traces.keys()


@asynccontextmanager
async def _on_stage(shape: Shape) -> AsyncIterator[tuple[_Fleet, list[Client], _Ends, Bus]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
        server = RedisServer(folder)
        await server.start()
        stack.push_async_callback(server.aclose)
        started = await stack.enter_async_context(nursery(folder))
        bus = await stack.enter_async_context(Bus.open(server.url))
        clients = [
            await stack.enter_async_context(tracewire.connect(server.url, name=f"service {number}"))
            for number in range(shape.clients)
        ]
        ends = _Ends(clients[0])
        group = await stack.enter_async_context(anyio.create_task_group())
        await group.start(ends.watch)
        yield _Fleet(shape, started, server.url, bus, clients[0]), clients, ends, bus
        group.cancel_scope.cancel()


async def run(shape: Shape) -> list[Phase]:
    """Run all phases."""
    random = Random(shape.seed)
    phases = []
    async with _on_stage(shape) as (fleet, clients, ends, bus):
        for number in range(shape.engines):
            await fleet.join(_model(number % shape.models))
        for client in clients:
            # One client sees them all.
            found = {model.name: len(model.engines) for model in await client.models.list()}
            assert sum(found.values()) == shape.engines
            assert len(found) == shape.models
        for name, count in (
            ("burst", shape.engines * shape.capacity // 2),
            ("steady", shape.steady),
            ("changing", shape.traces),
        ):
            load = _Load(name, shape, clients, random)
            fleet.said.clear()
            before = {one.name: one for one in fleet.taking()}
            began = time.monotonic()
            async with anyio.create_task_group() as group:
                if name == "changing":
                    group.start_soon(fleet.change, count / load.rate(), random)
                await load.submit(count, at_once=name == "burst")
                arrived = time.monotonic()
            ended = await ends.all_of(load.asked, shape.settle)
            over = time.monotonic()
            taking = {
                one.name: (max(one.since, began), one.until or arrived, one.how)
                for one in fleet.engines.values()
                if one.name in before or one.since >= began
            }
            phase = await _judge(load, bus, ends, taking, over - began)
            if not ended:
                phase.violations.append(f"not all had ended {shape.settle:g} s after the last was submitted")
            phase.changes = list(fleet.said)
            phases.append(phase)
            left = {_model(number): await bus.queue.waiting(_model(number)) for number in range(shape.models)}
            phase.violations += [
                f"{waiting} submissions wait for {model}" for model, waiting in left.items() if waiting
            ]
        for engine in fleet.taking():
            engine.child.send(signal.SIGTERM)
    return phases


async def _judge(
    load: _Load, bus: Bus, ends: _Ends, taking: dict[str, tuple[float, float, str]], seconds: float
) -> Phase:
    """Read every stream, and check it."""
    violations: list[Violation] = []
    counts: Counter[str] = Counter()
    waits: list[float] = []
    attempts = finished = 0
    for trace, asked in load.asked.items():
        entries = await bus.command("XRANGE", bus.keys.events(trace), "-", "+")
        stream = [(id_.decode(), dict(zip(flat[::2], flat[1::2], strict=True)).get(b"d", b"")) for id_, flat in entries]
        found = check_trace(asked, stream, {})
        if (told := ends.finals[trace]) != 1:
            found.append(Violation("two finals" if told else "no final", trace, f"{told} ends were told of"))
        violations += found
        finished += not found
        first = True
        for _, data in stream:
            event = decode_event(data)
            if isinstance(event, Accepted):
                attempts += 1
                counts[event.engine] += 1
                if first and event.attempt == 1:
                    waits.append((event.accepted_at - load.submitted[trace]) * 1000)
                first = False
    engines = {
        name: (counts.pop(name, 0), round(until - since, 1), how) for name, (since, until, how) in taking.items()
    }
    assert not counts, f"engines that nobody started: {counts}"
    rates = [count / max(during, 0.1) for count, during, _ in engines.values()]
    return Phase(
        name=load.name,
        traces=len(load.asked),
        seconds=round(seconds, 1),
        finished=finished,
        attempts=attempts,
        accept_p50=round(quantile(waits, 0.5), 2),
        accept_p99=round(quantile(waits, 0.99), 2),
        accept_max=round(max(waits, default=0.0), 2),
        engines=engines,
        unevenness=round(statistics.pstdev(rates) / statistics.mean(rates), 3) if any(rates) else 0.0,
        violations=[str(violation) for violation in violations],
    )


def _show(phase: Phase) -> None:
    print(
        f"{phase.name}: {phase.finished} of {phase.traces} traces ended once, as they should, in {phase.seconds} s "
        f"({phase.attempts} attempts)"
    )
    print(f"  accepted after: p50 {phase.accept_p50} ms, p99 {phase.accept_p99} ms, max {phase.accept_max} ms")
    for name, (count, during, how) in phase.engines.items():
        print(f"  {name}: {count} in {during} s, {count / max(during, 0.1):.1f} a second{', ' + how if how else ''}")
    print(f"  standard deviation of these rates over their mean: {phase.unevenness}")
    for line in (*phase.changes, *phase.violations):
        print(f"  {line}")


def main() -> int:
    """As a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    defaults = asdict(Shape())
    for name in (
        "traces",
        "steady",
        "engines",
        "models",
        "capacity",
        "pace",
        "load",
        "rounds",
        "lease",
        "clients",
        "seed",
    ):
        parser.add_argument(f"--{name}", type=type(defaults[name]), default=defaults[name])
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    phases = anyio.run(run, Shape(**options))
    for phase in phases:
        _show(phase)
    if as_json:
        print(json.dumps([asdict(phase) for phase in phases]))
    return 1 if any(phase.violations for phase in phases) else 0


if __name__ == "__main__":
    sys.exit(main())
