"""A scripted engine behind the adapter's own seam, in the adapter's process: no model, but everything else is real.

Every request puts out tokens that its prompt, its seed and their index alone determine. With a block it also saves a
small array with each, so that a reader of a trace can tell whether it has all of it, whichever attempt it comes from.
`python -m tests.support.scripted_engine --url URL --prefix PREFIX` serves as a process of its own until SIGTERM; it
prints `ready ENGINE`. On SIGUSR1 its engine dies under it, and on SIGUSR2 it prints `holds` and what it still holds of
any trace, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import socket
import struct
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from time import time
from typing import Any

import anyio
import msgspec

import tracewire
from tests.support.bus_engine import engine_info
from tests.support.fake_engine import FakeEngine, MergedOutputs, TextMessages
from tracewire_bus import recovery
from tracewire_bus.bus import Bus
from tracewire_bus.transport.link import Link
from tracewire_bus.wire.arrays import array_header, array_payload, encoded_array
from tracewire_bus.wire.digests import array_digest, list_digest
from tracewire_bus.wire.messages import Append, EngineInfo, Manifest, Set, Submission
from tracewire_engine.adapter.engine_api import Choice, EngineLost, Prepared, Rejection
from tracewire_engine.adapter.service import Adapter, Settings
from tracewire_engine.protocol.messages import Applied, Changes, FinishRecord, Report, StepRecord

__all__ = ["ScriptedEngine", "acts", "expected", "info", "serving"]

_encode = msgspec.msgpack.Encoder().encode
#: What the digest of one saved array begins with.
_, _HEAD = array_header("float64", (2,), 16)


@tracewire.intervention
def acts(model, tracer, live):
    """What the scripted engine plays, whatever the block says."""
    acts = [].save()


def info(model: str = "tiny", capacity: int = 256, engine: str = "", **fields: Any) -> EngineInfo:
    """What an engine of this kind registers."""
    name = engine or f"scripted-{uuid.uuid4().hex[:8]}"
    # Its prompts say how many tokens it puts out, as many as a test likes.
    described = {"capacity": capacity, "host": socket.gethostname(), "max_model_len": 1_000_000}
    return engine_info(model, name, **described | fields)


def _values(prompt: str, seed: int | None, index: int) -> tuple[int, bytes]:
    """A token's id, and its array's bytes: two float64."""
    key = blake2b(f"{prompt}/{seed}/{index}".encode(), digest_size=4).digest()
    token = int.from_bytes(key) % 4000
    return token, struct.pack("<dd", token, index)


def expected(prompt: str, tokens: int, seed: int | None = None) -> tuple[list[int], list[list[float]]]:
    """The tokens and the saved arrays of a request that ends by itself."""
    ids = [_values(prompt, seed, index)[0] for index in range(tokens)]
    return ids, [[float(token), float(index)] for index, token in enumerate(ids)]


class _Request(MergedOutputs):
    """A request, and what of it nobody has taken yet."""

    def __init__(self, name: str, prepared: Prepared) -> None:
        super().__init__()
        self.name = name
        self.prompt, self.tokens, self.seed, self.run, self.saves = prepared.params
        self.index = 0
        self.digests: list[bytes] = []
        self.over = False
        self.held = False

    def step(self) -> StepRecord:
        """Its next token."""
        index, self.index = self.index, self.index + 1
        token, data = _values(self.prompt, self.seed, index)
        deltas: list[Append | Set] = []
        if self.saves:
            self.digests.append(array_digest(_HEAD, data))
            item = encoded_array(array_payload("float64", (2,), data))
            deltas.append(Append(path=("acts",), items=[item]) if index else Set(path=("acts",), value=[item]))
        self.put(Choice(0, [token], f" {token}", finish_reason="length" if self.index == self.tokens else None))
        return StepRecord(self.name, 0, index, msgspec.Raw(_encode(deltas)))

    def put(self, choice: Choice) -> None:
        """Hand tokens over."""
        super().put(choice)
        self.over = self.over or choice.finish_reason is not None

    def finish(self) -> FinishRecord:
        """Its end."""
        manifest = [Manifest(0, 0, "acts", "list", self.index, list_digest(self.digests))] if self.digests else []
        return FinishRecord(self.name, 0, msgspec.Raw(_encode([])), manifest, steps=self.index)


class ScriptedEngine(FakeEngine):
    """An `Engine` that steps all its requests together, each time `pace` returns; for ever by itself, in `run`.

    A prompt that begins with `kill` kills its process in the step after its first token, and one with `die` only the
    engine; one that begins with `hang` never gets a token after its first.
    """

    #: What a request plays.
    request_type: type[_Request] = _Request

    def __init__(self, pace: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._pace = pace
        self._requests: dict[str, _Request] = {}
        self._begun = asyncio.Event()
        #: Versions of live parameters that the next step begins with, by run.
        self._steered: dict[str, int] = {}
        self.told_to_stop = self.holding = False
        #: How often it has stepped.
        self.steps = 0

    async def run(self) -> None:
        """Step for ever."""
        while True:
            while not self._requests and not self._steered:
                self._begun.clear()
                await self._begun.wait()
            await self._pace()
            self.step()

    def step(self) -> None:
        """One step of all requests that run."""
        if self.lost:
            return
        if self.holding:
            self._flush_aborted()
            return
        self.steps += 1
        records, finishes, applied = [], [], []
        for run, version in self._steered.items():
            first = [(one.name, 0, one.index) for one in self._requests.values() if one.run == run and not one.over]
            applied.append(Applied(run, version, first))
        self._steered.clear()
        for request in list(self._requests.values()):
            if request.held:
                continue
            if not request.over:
                if request.index and request.prompt.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if request.index and request.prompt.startswith("die"):
                    self.die()
                    return
                if request.index and request.prompt.startswith("hang"):
                    continue
                records.append(request.step())
            if request.over:
                finishes.append(request.finish())
                del self._requests[request.name]
        self.report(Report(time(), records, finishes, applied=applied))

    def _flush_aborted(self) -> None:
        finishes = [request.finish() for request in self._requests.values() if request.over]
        for finish in finishes:
            del self._requests[finish.request]
        self.report(Report(time(), [], finishes))

    def die(self) -> None:
        """Be lost, as an engine whose processes have died."""
        self.lost = True
        for request in self._requests.values():
            request.lost = True
            request.ready.set()

    async def prepare(
        self,
        submission: Submission,
        index: int,
        block: bytes | None,
        declared: bytes | None,
        run: str,
        edits: bytes | None = None,
        shared: bytes | None = None,
        tenant: str | None = "",
    ) -> Prepared:
        """`max_tokens` and `seed` count."""
        invoke = submission.invokes[index]
        tokens = invoke.sampling.get("max_tokens", 16)
        if not isinstance(tokens, int) or tokens < 1:
            raise Rejection("sampling.max_tokens", "expected a positive integer")
        params = (invoke.prompt or "", tokens, invoke.sampling.get("seed"), run, block is not None)
        parsers = [TextMessages()] if invoke.chat is not None else []
        sampling = dict(invoke.sampling)
        return Prepared(prompt=None, prompt_tokens=1, params=params, choices=1, sampling=sampling, parsers=[*parsers])

    async def start(self, request: str, prepared: Prepared, priority: int) -> _Request:
        """Run it from the next step on."""
        if self.lost:
            raise EngineLost("the scripted engine is lost")
        begun = self._requests[request] = self.request_type(request, prepared)
        self._begun.set()
        return begun

    async def abort(self, request: str) -> None:
        """End it now."""
        running = self._requests.get(request)
        if running is not None and not running.over:
            running.held = False
            running.put(Choice(0, [], "", finish_reason="abort"))

    async def steer(self, changes: Changes, over: list[str], since: float) -> None:
        """Nothing depends on what is steered, but it is said from which step on it holds."""
        self._steered.update({run: version for run, (version, _) in changes.items()})
        self._begun.set()

    @property
    def tracked(self) -> int:
        """How many requests it has that have not ended."""
        return len(self._requests)

    async def pause(self, request: str) -> bool:
        """Hold it."""
        running = self._requests.get(request)
        if running is None or running.over:
            return False
        running.held = True
        return True

    async def resume(self, request: str) -> bool:
        """Let it go on."""
        running = self._requests.get(request)
        if running is not None:
            running.held = False
        return running is not None

    async def pause_all(self) -> None:
        """Make no more steps."""
        self.holding = True

    async def takes_requests(self) -> bool:
        """Whether nobody has told it to stop."""
        return not self.told_to_stop

    async def resume_all(self) -> None:
        """Make steps again."""
        self.holding = False

    def decode(self, token_ids: list[int], prepared: Prepared) -> str:
        """The text of these tokens."""
        return "".join(f" {token}" for token in token_ids)


@asynccontextmanager
async def serving(
    bus: Bus, engine: ScriptedEngine, described: EngineInfo | None = None, **settings: Any
) -> AsyncIterator[Adapter]:
    """An adapter in this process that serves this engine. Stopped at the end, if it has not ended before."""
    chosen = Settings(**{"heartbeat_s": 0.05, "drain_s": 0.0, "poll_s": 0.05} | settings)
    adapter = Adapter(engine, described or info(), bus, chosen)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.run)
        group.start_soon(adapter.run)
        try:
            yield adapter
        finally:
            adapter.stop()
            await adapter.ended.wait()
            group.cancel_scope.cancel()


async def _main(options: argparse.Namespace) -> int:
    engine = ScriptedEngine(partial(anyio.sleep, 1 / options.rate))
    described = info(options.model, options.capacity, options.engine)
    recovery.PATIENCE_S, recovery.CERTAIN_S = options.patience, options.certain
    if options.command is not None and Link.execute.__kwdefaults__ is not None:
        Link.execute.__kwdefaults__["timeout_s"] = options.command
    settings = Settings(heartbeat_s=options.lease / 5, lease_s=options.lease, drain_s=options.drain)
    settings = dataclasses.replace(
        settings,
        retain_events=options.retain_events,
        retain_traces=options.retain_traces,
        retain_total_bytes=options.retain_total_bytes,
    )
    opened = Bus.open(options.url, prefix=options.prefix, retention_s=options.retention)
    async with opened as bus, anyio.create_task_group() as group:
        adapter = Adapter(engine, described, bus, settings)

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) as signals:
                async for number in signals:
                    if number == signal.SIGUSR1:
                        engine.die()
                    elif number == signal.SIGUSR2:
                        print("holds", json.dumps(_held(engine, adapter, bus)), flush=True)
                    else:
                        adapter.stop()

        group.start_soon(watch_signals)
        group.start_soon(engine.run)
        print(f"ready {described.engine}", flush=True)
        await adapter.run()
        group.cancel_scope.cancel()
    return 1 if adapter.lost else 0


def _held(engine: ScriptedEngine, adapter: Adapter, bus: Bus) -> dict[str, int]:
    """What is left in this process of traces that have ended, or that run."""
    return {
        "requests": engine.tracked,
        "pending": len(adapter._pending),
        "runs": len(adapter._intake.scopes),
        "traces": len(adapter._claims.runs),
        "live": len(adapter._reports.live),
        "claimed": sum(len(intake.claimed) for intake in bus.queue._intakes.values()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """As a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prefix", default="tw")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--rate", type=float, default=100.0, help="steps a second")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds")
    parser.add_argument("--drain", type=float, default=0.2, help="seconds")
    parser.add_argument("--engine", default="", help="its name in the registry")
    parser.add_argument("--patience", type=float, default=recovery.PATIENCE_S, help="seconds: recovery's PATIENCE_S")
    parser.add_argument("--certain", type=float, default=recovery.CERTAIN_S, help="seconds: recovery's CERTAIN_S")
    parser.add_argument("--command", type=float, help="seconds that one command may take")
    parser.add_argument("--retention", type=float, default=3600.0, help="seconds that a trace is kept after its end")
    parser.add_argument("--retain-events", type=int, default=0, help="trim a stream that has more events than this")
    parser.add_argument("--retain-traces", type=int, default=0, help="how many finished traces are kept")
    parser.add_argument("--retain-total-bytes", type=int, default=0, help="how many bytes finished traces may take")
    return anyio.run(_main, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
