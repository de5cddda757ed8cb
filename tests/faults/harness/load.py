"""The load that runs while something breaks: traces of many kinds, each with several consumers, all written down."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio

import tracewire
from tests.faults.harness.checker import Asked, Violation, check_trace
from tests.faults.harness.consumer import journal_of, noted, position
from tests.faults.harness.processes import Child
from tests.faults.harness.stage import MODEL, Stage
from tests.support.scripted_engine import acts
from tracewire import Client
from tracewire_bus.domain.fold import DigestMismatch, Fold, FoldError
from tracewire_bus.transport.errors import BusError

__all__ = ["Load"]


@dataclass
class _Plan:
    """What one trace of a load does. All of it is drawn before anything runs, so that a seed says it all."""

    asked: Asked
    delay: float
    submitter: int
    detach: bool
    twice: int | None
    steers: list[float] = field(default_factory=list)
    cancel_after: float | None = None
    #: How long it runs before it is paused, and for how long it is, each time.
    pauses: list[tuple[float, float]] = field(default_factory=list)
    #: After how many events its restless consumer leaves, to go on with another client.
    stays: list[int] = field(default_factory=list)
    #: For how long it is away each time.
    nap: float = 0.0


class Load:
    """The traces of one trial."""

    def __init__(self, stage: Stage, random: Random, name: str, *, traces: tuple[int, int], tokens: tuple[int, int]):
        self.stage = stage
        self.name = name
        self._random = random
        self._plans = [self._plan(number, tokens) for number in range(random.randint(*traces))]
        self.asked = {plan.asked.trace: plan.asked for plan in self._plans}
        #: What each consumer got, by trace and consumer.
        self.got: dict[str, dict[str, list[tuple[str, bytes]]]] = {trace: {} for trace in self.asked}
        #: When the first consumer of each trace got what, by the clock of `Stage.mark`: kind and attempt.
        self.arrived: dict[str, list[tuple[float, str, int]]] = {trace: [] for trace in self.asked}
        self.violations: list[Violation] = []
        self.begun = anyio.Event()
        self.processes: dict[str, Child] = {}
        self.restarts = 0

    def _plan(self, number: int, tokens: tuple[int, int]) -> _Plan:
        random = self._random
        fails, live = random.random() < 0.1, random.random() < 0.25
        asked = Asked(
            f"{self.name}-{number}",
            f"prompt {random.randrange(1000)}",
            random.randint(*tokens),
            tries=1 if fails else random.randint(3, 5),
            live=live,
            cancelled=random.random() < 0.05,
        )
        if random.random() < 0.15:
            asked.more = [f"prompt {random.randrange(1000)}" for _ in range(random.randint(1, 3))]
        # Most deadlines are far away; some come in the middle of it, or before it has begun.
        if (draw := random.random()) < 0.2:
            asked.deadline_s = 120.0 if draw < 0.12 else random.uniform(0.1, 1.5)
        asked.pauses = random.choice([1, 1, 2, 3]) if random.random() < 0.15 else 0
        return _Plan(
            asked,
            delay=random.uniform(0, 0.6),
            submitter=random.randrange(len(self.stage.clients)),
            detach=random.random() < 0.6,
            twice=random.randrange(len(self.stage.clients)) if random.random() < 0.2 else None,
            steers=[random.uniform(0, 0.3) for _ in range(random.randint(1, 5))] if live else [],
            cancel_after=random.uniform(0.05, 0.5) if asked.cancelled else None,
            pauses=[(random.uniform(0, 0.4), random.uniform(0, 0.8)) for _ in range(asked.pauses)],
            stays=[random.randint(1, 25) for _ in range(random.randint(1, 3))],
            nap=random.choice([0.0, random.uniform(0.0, 0.5)]),
        )

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Submit everything, and wait until every consumer has had its final."""
        for name in ("a process", "another process"):
            await self.start_consumer(name)
        async with anyio.create_task_group() as group:
            for plan in self._plans:
                group.start_soon(self._guarded, plan)
            group.start_soon(self._wait_for_processes)

    def journal(self, name: str) -> Path:
        """Where the consumer process of this name writes down what it reads."""
        return self.stage.folder / f"{self.name} {name}.journal"

    async def start_consumer(self, name: str) -> None:
        """Start a consumer process, or go on with its journal in another one."""
        self.processes[name] = await self.stage.nursery.start(
            *("consumer", "--url", self.stage.consumer_url, "--prefix", self.stage.prefix),
            *("--journal", str(self.journal(name)), *self.asked),
        )

    async def _wait_for_processes(self) -> None:
        while True:
            waiting = {name: child for name, child in self.processes.items() if not child.ended.is_set()}
            if not waiting:
                break
            for child in waiting.values():
                await child.ended.wait()
            # Whoever killed one starts another.
            await anyio.sleep(0.2)
        for name, child in self.processes.items():
            if child.status:
                text = child.log.read_text(errors="replace")[-500:]
                self.violations.append(Violation("wrong", name, f"it ended with {child.status}: {text}"))

    async def _guarded(self, plan: _Plan) -> None:
        try:
            await self._run(plan)
        except Exception as error:
            self.violations.append(Violation("wrong", plan.asked.trace, f"{type(error).__name__}: {error}"))

    async def _run(self, plan: _Plan) -> None:
        await anyio.sleep(plan.delay)
        trace = self._trace(plan, self.stage.clients[plan.submitter], plan.detach)
        await self._submit(trace)
        self.begun.set()
        async with anyio.create_task_group() as group:
            if plan.twice is not None:
                group.start_soon(self._submit, self._trace(plan, self.stage.clients[plan.twice], True))
            group.start_soon(self._read, plan.asked.trace, "a reader", plan.submitter, [])
            group.start_soon(
                self._read, plan.asked.trace, "a restless reader", plan.submitter + 1, plan.stays, plan.nap
            )
            if plan.steers:
                group.start_soon(self._steer, plan)
            if plan.pauses:
                group.start_soon(self._pause, plan)
            if plan.cancel_after is not None:
                group.start_soon(self._cancel, plan, plan.cancel_after)
            if not plan.detach:
                group.start_soon(self._result, trace)
        await trace.aclose()

    def _trace(self, plan: _Plan, client: Client, detach: bool) -> tracewire.Trace:
        asked = plan.asked
        return client.trace(
            MODEL,
            None,
            acts,
            prompts=[asked.prompt, *asked.more],
            deadline=asked.deadline_s,
            live={"alpha": 0.0} if asked.live else None,
            trace_id=asked.trace,
            detach=detach,
            on_engine_loss="fail" if asked.tries == 1 else "restart",
            max_attempts=asked.tries if asked.tries > 1 else 3,
            max_tokens=asked.tokens,
        )

    async def _submit(self, trace: tracewire.Trace) -> None:
        while True:
            try:
                await trace.start()
                return
            except (tracewire.ConnectError, tracewire.UnknownModel, tracewire.BusFull):
                # No engine or no memory for now, or nobody knows whether it was queued: again, under the same id.
                await anyio.sleep(0.05)

    async def _result(self, trace: tracewire.Trace) -> None:
        try:
            await trace.result()
        except tracewire.TraceFailed:
            # Whether it may have is seen in its stream.
            return

    async def _steer(self, plan: _Plan) -> None:
        asked = plan.asked
        for pause in plan.steers:
            await anyio.sleep(pause)
            try:
                client = self.stage.clients[self._random.randrange(len(self.stage.clients))]
                asked.steered.add(await client.steer(asked.trace, alpha=float(self._random.random())))
            except tracewire.TraceEnded:
                return
            except (tracewire.ConnectError, tracewire.BusFull):
                asked.unsure = True

    async def _pause(self, plan: _Plan) -> None:
        """Pause it and let it go on, from another client each time. Nobody leaves it paused."""
        trace, clients = plan.asked.trace, self.stage.clients
        for number, (before, pause) in enumerate(plan.pauses):
            await anyio.sleep(before)
            one, other = (clients[(plan.submitter + number + step) % len(clients)] for step in (0, 1))
            try:
                await self._until_answered(partial(one.pause, trace))
                await anyio.sleep(pause)
                await self._until_answered(partial(other.resume, trace))
            except tracewire.TraceEnded:
                return

    async def _cancel(self, plan: _Plan, pause: float) -> None:
        await anyio.sleep(pause)
        await self._until_answered(lambda: self.stage.clients[0].cancel(plan.asked.trace, "for a trial"))

    async def _until_answered(self, ask: Callable[[], Awaitable[Any]]) -> None:
        while True:
            try:
                await ask()
                return
            except (tracewire.ConnectError, tracewire.BusFull):
                await anyio.sleep(0.05)

    async def _read(self, trace: str, name: str, client: int, stays: list[int], nap: float = 0.0) -> None:
        """A consumer: folds as it reads, and leaves and comes back by id as often as it is told."""
        entries = self.got[trace].setdefault(name, [])
        arrived = self.arrived[trace] if not stays else None
        fold = Fold(verifying=True)
        stays = [*stays]
        while True:
            room = stays.pop(0) if stays else None
            since = position(entries)
            try:
                async with self._subscription(trace, client, since, entries) as events:
                    async for event in events:
                        if isinstance(event, tracewire.Gap):
                            entries.append((f"gap {event.since} {event.until}", event._data))
                            fold.resume(event.snapshot())
                            continue
                        fold.apply(event)
                        if arrived is not None:
                            arrived.append((time.monotonic(), type(event).__name__, event.attempt))
                        room = room - 1 if room is not None else None
                        if room == 0:
                            break
            except (tracewire.ConnectError, tracewire.BusFull):
                await anyio.sleep(0.05)
            except (FoldError, tracewire.BrokenStream) as error:
                self.violations.append(Violation("wrong", trace, f"{name}: {error}"))
                return
            if fold.finished:
                break
            client += 1
            await anyio.sleep(nap)
        try:
            fold.verify()
        except DigestMismatch as error:
            self.violations.append(Violation("wrong", trace, f"{name}: {error}"))

    def _subscription(
        self, trace: str, client: int, since: str, entries: list[tuple[str, bytes]]
    ) -> tracewire.Subscription:
        """A subscription that writes down what it hands out."""
        clients = self.stage.clients
        subscription = clients[client % len(clients)].subscribe(trace, since=since)
        reader: Any = subscription._reader
        decode = reader._decode

        def noted(entry: Any) -> Any:
            entries.append((entry.id, entry.data))
            return decode(entry)

        reader._decode = noted
        return subscription

    # --- afterwards ---------------------------------------------------------------------------------------------------

    async def check(self) -> list[Violation]:
        """What is wrong with what it wrote down."""
        bus = self.stage.bus
        for name, child in self.processes.items():
            child.send(signal.SIGKILL)
            journal = journal_of(self.journal(name))
            for trace in self.asked:
                self.got[trace][name] = journal.get(trace, [])
            self.journal(name).unlink(missing_ok=True)
        found = [*self.violations]
        for trace, asked in self.asked.items():
            stream = []
            try:
                with anyio.move_on_after(5):
                    async for entry in bus.read(trace):
                        # One by one: without a final it is cut short.
                        stream.append(noted(entry))  # noqa: PERF401
            except BusError as error:
                found.append(Violation("lost", trace, f"the stream: {error}"))
                reply = await bus.command("XRANGE", bus.keys.events(trace), "-", "+")
                stream = [(id_.decode(), flat[flat.index(b"d") + 1]) for id_, flat in reply]
            found += check_trace(asked, stream, self.got[trace])
            self.restarts += len({attempt for _, kind, attempt in self.arrived[trace] if kind == "Restarted"})
        return found

    def recovered(self, since: float) -> list[float]:
        """How long each trace that was restarted took from this moment to the first output of a later attempt."""
        times = []
        for arrived in self.arrived.values():
            before = max((attempt for at, _, attempt in arrived if at <= since), default=None)
            if before is None:
                continue
            first = next((at for at, kind, attempt in arrived if kind == "Output" and attempt > before), None)
            if first is not None:
                times.append(first - since)
        return times

    def first_event(self, since: float) -> float | None:
        """How long it took from this moment to the first event of any trace."""
        times = [at for arrived in self.arrived.values() for at, _, _ in arrived if at > since]
        return min(times) - since if times else None
