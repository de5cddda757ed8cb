"""What signatures cost: submissions and tokens a second with signing on, beside the same with signing off.

    python -m benchmarks.policy [--concurrency 32] [--tokens 64] [--rounds 12] [--seconds 2] [--engines MODEL] [--json]

Two engines serve one embedded Redis. One is *strict*: it verifies each submission by a keyring, marks its nonce, signs
each final and writes an audit trail, and its client signs and verifies. The other engine and client do none of that.
All other limits are on for both. This process runs `--concurrency` traces at a time against one of them, in rounds of
`--seconds` that take turns (on, off, off, on, ...), and counts the traces that ended and their tokens.

These loads are measured:

- `full`: scripted engines, which make tokens as fast as their adapters take them. Processor time is all that limits
  these figures, so that they are of the adapter's and the client's own work.
- `busy`: the same engines make a token of each trace every 5 ms, of six times as many traces: more than two cores
  carry.
- `paced`: they make a token of each trace every `--step-ms` milliseconds, as a model would.
- `model`, with `--engines MODEL`: two whole engines of that model, of `tracewire engine`.

Each load has `submissions` and `tokens`: the median over the pairs of rounds of the rate with signing over that
without. `ratio` is the lowest of these medians. `spread` has the lower and the upper quartile of the submissions'
ratio. `cpu_ms`, of scripted engines, is the processor time of a trace in this process, the adapter and Redis together,
and `cpu` the median of that without signing over that with. Other load on the machine changes it less than it changes
the rates.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import psutil

import tracewire
from benchmarks.processes import at_least, show, start
from tests.support.scripted_engine import ScriptedEngine, info
from tracewire_bus.bus import Bus
from tracewire_bus.domain.identity import Keyring, Signer, new_key
from tracewire_bus.transport.embedded import EmbeddedServer
from tracewire_engine.adapter.gate import Identity
from tracewire_engine.adapter.service import Adapter, Settings

SIDES = ("off", "on")


def settings(side: str, folder: Path) -> Settings:
    """Those of one adapter."""
    if side == "off":
        return Settings()
    ring = Keyring(folder / "keyring.json")
    return Settings(identity=Identity(ring, False, "measured", Signer.load(folder / "engine.key")), audit=100_000)


async def serve(side: str, folder: Path, url: str, step_s: float) -> None:
    """One adapter, until its standard input ends."""
    engine = ScriptedEngine(partial(anyio.sleep, step_s))
    async with Bus.open(url) as bus, anyio.create_task_group() as group:
        adapter = Adapter(engine, info(f"signing-{side}"), bus, settings(side, folder))
        group.start_soon(engine.run)
        group.start_soon(adapter.run)
        await adapter.serving.wait()
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


class Round(NamedTuple):
    """Submissions and tokens a second of one round, and the processor time of a trace, in milliseconds."""

    submissions: float
    tokens: float
    cpu_ms: float


class Pair(NamedTuple):
    """For each side a client and the model that it asks for, and the processes whose time counts."""

    clients: Mapping[str, tracewire.Client]
    models: Mapping[str, str]
    pids: Mapping[str, Sequence[int]]
    #: How long a pair of engines is let come to rest before a round, in seconds: vLLM's processes spin for one.
    settle_s: float = 0.0


def cpu_s(pids: Sequence[int]) -> float:
    """The processor time of these processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def load(pair: Pair, side: str, options: argparse.Namespace, seconds: float) -> Round:
    """One round, which begins traces for so long."""
    client, model, pids = pair.clients[side], pair.models[side], pair.pids[side]
    ended = tokens = 0
    await anyio.sleep(pair.settle_s)
    until = time.perf_counter() + seconds

    async def one() -> None:
        nonlocal ended, tokens
        while time.perf_counter() < until:
            result = await client.trace(model, "valid", max_tokens=options.tokens, ignore_eos=True).result()
            ended += 1
            tokens += len(result.token_ids)

    began, before_s = time.perf_counter(), cpu_s(pids)
    async with anyio.create_task_group() as group:
        for _ in range(options.concurrency):
            group.start_soon(one)
    took_s = time.perf_counter() - began
    return Round(ended / took_s, tokens / took_s, 1000 * (cpu_s(pids) - before_s) / ended)


async def rounds(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """What one load finds, both sides in turns."""
    found: dict[str, list[Round]] = {side: [] for side in SIDES}
    for side in SIDES:
        # Once before anything counts.
        await load(pair, side, options, 0.5)
    for number in range(options.rounds):
        for side in SIDES if number % 2 else SIDES[::-1]:
            found[side].append(await load(pair, side, options, options.seconds))
    pairs = list(zip(found["on"], found["off"], strict=True))
    submissions = [on.submissions / off.submissions for on, off in pairs]
    quartiles = quantiles(submissions, n=4) if len(submissions) > 1 else submissions * 3
    return {
        "submissions": round(median(submissions), 4),
        "tokens": round(median(on.tokens / off.tokens for on, off in pairs), 4),
        "spread": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "submissions_per_s": {side: round(median(one.submissions for one in found[side]), 2) for side in SIDES},
        "tokens_per_s": {side: round(median(one.tokens for one in found[side]), 2) for side in SIDES},
    } | ({} if not pair.pids["on"] else cpu(found))


def cpu(found: Mapping[str, list[Round]]) -> dict[str, Any]:
    """The processor time of a trace."""
    pairs = zip(found["on"], found["off"], strict=True)
    return {
        "cpu": round(median(off.cpu_ms / on.cpu_ms for on, off in pairs), 4),
        "cpu_ms": {side: round(median(one.cpu_ms for one in found[side]), 2) for side in SIDES},
    }


@contextmanager
def scripted(folder: Path, url: str, step_ms: int) -> Iterator[dict[str, int]]:
    """Two adapters with scripted engines. Yields their process ids."""
    arguments = ("--folder", str(folder), "--url", url, "--step-ms", str(step_ms))
    engines = {side: start("benchmarks.policy", "--serve", side, *arguments) for side in SIDES}
    try:
        yield {side: engine.pid for side, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.communicate()


@contextmanager
def whole(folder: Path, url: str, model: str) -> Iterator[None]:
    """Two whole engines of a model, ready.

    Raises:
        RuntimeError: an engine has ended instead.
    """
    strict = ("--keyring", str(folder / "keyring.json"), "--unsigned", "refuse")
    engines: list[subprocess.Popen[str]] = []
    try:
        for side, options in (("off", ("--audit", "0")), ("on", (*strict, "--engine-key", str(folder / "engine.key")))):
            with (folder / f"{side}.log").open("wb") as log:
                engine = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "tracewire.cli", "engine", model, "--name", f"signing-{side}"),
                        *("--url", url, *options),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
                )
            engines.append(engine)
            assert engine.stdout is not None
            if not any(line.startswith("ready") for line in engine.stdout):
                raise RuntimeError(f"the engine did not start:\n{(folder / f'{side}.log').read_text()[-4000:]}")
        yield
    finally:
        for engine in engines:
            with suppress(ProcessLookupError):
                engine.terminate()
            engine.communicate()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All loads."""
    loads: dict[str, dict[str, Any]] = {}
    models = {side: f"signing-{side}" for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Keyring(folder / "keyring.json").add(new_key(folder / "client.key", "client", "red", ["submit", "steer"]))
        new_key(folder / "engine.key", "engine", "engines", [])
        signing: dict[str, Any] = {
            "key": folder / "client.key",
            "engine_keys": [Signer.load(folder / "engine.key").public],
        }
        async with (
            EmbeddedServer.start() as server,
            tracewire.connect(server.url) as off,
            tracewire.connect(server.url, **signing) as on,
        ):
            clients = {"off": off, "on": on}
            for what, step_ms, times in (("full", 0, 1), ("busy", 5, 6), ("paced", options.step_ms, 1)):
                sized = argparse.Namespace(**{**vars(options), "concurrency": times * options.concurrency})
                with scripted(folder, server.url, step_ms) as pids:
                    processes = {side: (os.getpid(), pids[side], server.pid) for side in SIDES}
                    loads[what] = await rounds(Pair(clients, models, processes), sized)
            if options.engines:
                with whole(folder, server.url, options.engines):
                    pair = Pair(clients, models, dict.fromkeys(SIDES, ()), settle_s=2.5)
                    loads["model"] = await rounds(pair, options)
    lowest = min(min(one["submissions"], one["tokens"]) for one in loads.values())
    sizes = {name: getattr(options, name) for name in ("concurrency", "tokens", "step_ms", "rounds", "seconds")}
    return {"ratio": lowest, **loads, **sizes}


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=at_least(1), default=32, help="traces at a time")
    parser.add_argument("--tokens", type=at_least(1), default=64, help="tokens of a trace")
    parser.add_argument("--step-ms", type=at_least(0), default=20, help="milliseconds between two tokens, where paced")
    parser.add_argument("--rounds", type=at_least(1), default=12, help="rounds of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a round begins new traces")
    parser.add_argument("--engines", metavar="MODEL", help="measure whole engines of this model, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        anyio.run(serve, options.serve, options.folder, options.url, options.step_ms / 1000)
        return
    show(anyio.run(measure, options), as_json=options.json, width=20)


if __name__ == "__main__":
    main()
