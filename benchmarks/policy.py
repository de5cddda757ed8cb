"""What signatures cost: submissions and tokens a second with signing on, beside the same with signing off.

    python -m benchmarks.policy [--concurrency 32] [--tokens 64] [--step-ms 20] [--rounds 6] [--seconds 4] [--json]

Two adapters with scripted engines, each a process of its own, serve one embedded Redis. One is *strict*: it verifies
each submission by a keyring, marks its nonce, signs each final and writes an audit trail. Its client signs. The other
adapter and client do none of that. This process runs `--concurrency` traces at a time against one of them, in rounds of
`--seconds` that take turns (on, off, off, on, ...), and counts the traces that ended and their tokens.

An engine makes a token of each trace every `--step-ms` milliseconds, as a model would. With `--step-ms 0` it makes them
as fast as the adapter takes them, so that processor time is all that limits the figures: the ratio then is that of the
adapter's and the client's own work.

`ratio` is the lower of two medians over the pairs of rounds: submissions a second with signing over those without, and
tokens a second likewise. `spread` has the lower and the upper quartile of the submissions' ratio over the pairs.
`cpu_ms` is the processor time of a trace in this process, the adapter and Redis together, and `cpu_ratio` the median of
that without signing over that with. Other load on the machine changes it less than it changes the rates.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
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


def cpu_s(pids: Sequence[int]) -> float:
    """The processor time of these processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def load(client: tracewire.Client, side: str, options: argparse.Namespace, pids: Sequence[int]) -> Round:
    """One round. `pids` are the processes that take part."""
    ended = tokens = 0
    until = time.perf_counter() + options.seconds

    async def one() -> None:
        nonlocal ended, tokens
        while time.perf_counter() < until:
            result = await client.trace(f"signing-{side}", "valid", max_tokens=options.tokens).result()
            ended += 1
            tokens += len(result.token_ids)

    began, before_s = time.perf_counter(), cpu_s(pids)
    async with anyio.create_task_group() as group:
        for _ in range(options.concurrency):
            group.start_soon(one)
    took_s = time.perf_counter() - began
    return Round(ended / took_s, tokens / took_s, 1000 * (cpu_s(pids) - before_s) / ended)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides, in turns."""
    found: dict[str, list[Round]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Keyring(folder / "keyring.json").add(new_key(folder / "client.key", "client", "red", ["submit", "steer"]))
        new_key(folder / "engine.key", "engine", "engines", [])
        async with EmbeddedServer.start() as server:
            arguments = ("--folder", name, "--url", server.url, "--step-ms", str(options.step_ms))
            engines = [start("benchmarks.policy", "--serve", side, *arguments) for side in SIDES]
            try:
                trusted = [Signer.load(folder / "engine.key").public]
                signing: dict[str, Any] = {"key": folder / "client.key", "engine_keys": trusted}
                async with tracewire.connect(server.url) as off, tracewire.connect(server.url, **signing) as on:
                    clients = {"off": off, "on": on}
                    pids = {side: (os.getpid(), one.pid, server.pid) for side, one in zip(SIDES, engines, strict=True)}
                    for side in SIDES:
                        # Once before anything counts.
                        short = argparse.Namespace(**{**vars(options), "seconds": 0.5})
                        await load(clients[side], side, short, pids[side])
                    for number in range(options.rounds):
                        for side in SIDES if number % 2 else SIDES[::-1]:
                            found[side].append(await load(clients[side], side, options, pids[side]))
            finally:
                for process in engines:
                    process.communicate()
    return figures(found, options)


def figures(found: dict[str, list[Round]], options: argparse.Namespace) -> dict[str, Any]:
    """What is printed."""
    pairs = list(zip(found["on"], found["off"], strict=True))
    submissions = [on.submissions / off.submissions for on, off in pairs]
    ratios = {"submissions": median(submissions), "tokens": median(on.tokens / off.tokens for on, off in pairs)}
    quartiles = quantiles(submissions, n=4) if len(submissions) > 1 else submissions * 3
    return {
        "ratio": round(min(ratios.values()), 4),
        **{f"{what}_ratio": round(ratio, 4) for what, ratio in ratios.items()},
        "spread": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "cpu_ratio": round(median(off.cpu_ms / on.cpu_ms for on, off in pairs), 4),
        **{
            name: {side: round(median(getattr(one, field) for one in found[side]), 2) for side in SIDES}
            for name, field in (
                ("submissions_per_s", "submissions"),
                ("tokens_per_s", "tokens"),
                ("cpu_ms", "cpu_ms"),
            )
        },
        "concurrency": options.concurrency,
        "tokens": options.tokens,
        "step_ms": options.step_ms,
        "rounds": options.rounds,
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=at_least(1), default=32, help="traces at a time")
    parser.add_argument("--tokens", type=at_least(1), default=64, help="tokens of a trace")
    parser.add_argument("--step-ms", type=at_least(0), default=20, help="milliseconds between two tokens of a trace")
    parser.add_argument("--rounds", type=at_least(1), default=6, help="rounds of each side")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a round begins new traces")
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
