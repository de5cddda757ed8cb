"""What signatures cost: submissions and tokens a second with signing on, beside the same with signing off.

    python -m benchmarks.policy [--loads served,paced,full,busy] [--concurrency 32] [--tokens 64] [--rounds 20]
        [--seconds 1] [--engines MODEL] [--json]

Two engines serve one embedded Redis. One is *strict*: it verifies each submission by a keyring, marks its nonce, signs
each final and writes an audit trail, and its client signs and verifies. The other engine and client do none of that.
All other limits are on for both. This process runs `--concurrency` traces at a time against one of them, in rounds of
`--seconds` that take turns (on, off, off, on, ...), and counts the traces that ended and their tokens.

These loads are measured:

- `served`: scripted engines step every `--served-ms` milliseconds by the clock, as a model does whose steps run on
  other processors than its adapter. Traces have different lengths, `--tokens` in the mean, so that they begin and end
  apart from each other. One signature covers one or two messages.
- `paced`: scripted engines make a token of each trace `--step-ms` milliseconds after their adapters have taken the
  tokens before. All traces have `--tokens` tokens, also in the following loads.
- `full`: they make tokens as fast as their adapters take them. No model takes time, so these figures are of the
  processor time of client, adapter and Redis.
- `busy`: they make a token of each trace every 5 ms, of six times as many traces: more than two cores carry.
- `model`, with `--engines MODEL`: two whole engines of that model, of `tracewire engine`.

In `full` and `busy` traces begin and end in groups. The size of the groups changes the time of a trace more than
signatures do: in groups of 32 a trace takes a third less processor time than in groups of 16. So a run of these two
loads is good to some 0.05.

Each load has `submissions` and `tokens`: the median over the pairs of rounds of the rate with signing over that
without. `ratio` is the lowest of these medians of the loads in which a model takes its time (`served`, `paced` and
`model`), and `bound` that of the loads in which the processors limit the rate (`full` and `busy`). `spread` has the
lower and the upper quartile of the submissions' ratio. `cpu_ms`, of scripted engines, is the processor time of a trace:
all, and that of this process, the adapter and Redis. `cpu` is the median of all of it without signing over that with.
Other load on the machine changes it less than it changes the rates.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

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


class Load(NamedTuple):
    """How scripted engines step, and what their clients ask for.

    Attributes:
        option: the option with the milliseconds between two steps; or
        step_ms: these milliseconds.
        clocked: whether an engine steps by the clock, rather than so long after its adapter has taken the step before.
        times: how many times `--concurrency` traces run at once.
        varied: whether traces have different lengths.
        model: whether the engine stands for a model that takes its time, rather than be limited by processors alone.
    """

    option: str = ""
    step_ms: int = 0
    clocked: bool = False
    times: int = 1
    varied: bool = False
    model: bool = False


LOADS: Final = {
    "served": Load("served_ms", clocked=True, varied=True, model=True),
    "paced": Load("step_ms", model=True),
    "full": Load(),
    "busy": Load(step_ms=5, times=6),
}


def settings(side: str, folder: Path) -> Settings:
    """Those of one adapter."""
    if side == "off":
        return Settings()
    ring = Keyring(folder / "keyring.json")
    return Settings(identity=Identity(ring, False, "measured", Signer.load(folder / "engine.key")), audit=100_000)


class Clock:
    """Returns every `step_s` seconds by the clock. After a call that comes late it makes up for the lost time.

    A model whose steps run elsewhere does not wait for its adapter either. After a pause of more than `PAUSE_S`, in
    which the engine had no requests, nothing is made up for.
    """

    PAUSE_S = 0.1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due = 0.0

    async def __call__(self) -> None:
        """Wait until the next step is due."""
        now = anyio.current_time()
        self._due += self._step_s
        if now - self._due > self.PAUSE_S:
            self._due = now + self._step_s
        await anyio.sleep(max(0.0, self._due - now))


async def serve(side: str, folder: Path, url: str, step_s: float, clocked: bool) -> None:
    """One adapter, until its standard input ends."""
    engine = ScriptedEngine(Clock(step_s) if clocked else partial(anyio.sleep, step_s))
    async with Bus.open(url) as bus, anyio.create_task_group() as group:
        adapter = Adapter(engine, info(f"signing-{side}"), bus, settings(side, folder))
        group.start_soon(engine.run)
        group.start_soon(adapter.run)
        await adapter.serving.wait()
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


class Round(NamedTuple):
    """Submissions and tokens a second of one round, and the processor time of a trace by process, in milliseconds."""

    submissions: float
    tokens: float
    cpu_ms: Mapping[str, float]


class Pair(NamedTuple):
    """For each side a client and the model that it asks for, and the processes whose time counts, by name."""

    clients: Mapping[str, tracewire.Client]
    models: Mapping[str, str]
    pids: Mapping[str, Mapping[str, int]]
    #: Whether traces have different lengths.
    varied: bool = False
    #: How long a pair of engines is let come to rest before a round, in seconds: vLLM's processes spin for one.
    settle_s: float = 0.0


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """The processor time of these processes so far."""
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


async def load(pair: Pair, side: str, options: argparse.Namespace, seconds: float, number: int = 0) -> Round:
    """One round, which begins traces for so long. Rounds of one number ask for the same lengths in the same order."""
    client, model, pids = pair.clients[side], pair.models[side], pair.pids[side]
    ended = tokens = 0
    lengths = Random(number)
    await anyio.sleep(pair.settle_s)
    until = time.perf_counter() + seconds

    def length() -> int:
        most: int = options.tokens
        return lengths.randint(max(1, most // 4), most * 2 - most // 4) if pair.varied else most

    async def one() -> None:
        nonlocal ended, tokens
        while time.perf_counter() < until:
            result = await client.trace(model, "valid", max_tokens=length(), ignore_eos=True).result()
            ended += 1
            tokens += len(result.token_ids)

    began, before_s = time.perf_counter(), cpu_s(pids)
    async with anyio.create_task_group() as group:
        for _ in range(options.concurrency):
            group.start_soon(one)
    took_s, after_s = time.perf_counter() - began, cpu_s(pids)
    spent_ms = {name: 1000 * (after_s[name] - before_s[name]) / ended for name in pids}
    return Round(ended / took_s, tokens / took_s, spent_ms)


async def rounds(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """What one load finds, both sides in turns."""
    found: dict[str, list[Round]] = {side: [] for side in SIDES}
    for side in SIDES:
        # Once before anything counts.
        await load(pair, side, options, 0.5)
    for number in range(options.rounds):
        for side in SIDES if number % 2 else SIDES[::-1]:
            found[side].append(await load(pair, side, options, options.seconds, number))
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
    """The processor time of a trace, altogether and by process."""
    pairs = zip(found["on"], found["off"], strict=True)
    whole = {side: [sum(one.cpu_ms.values()) for one in found[side]] for side in SIDES}
    return {
        "cpu": round(median(sum(off.cpu_ms.values()) / sum(on.cpu_ms.values()) for on, off in pairs), 4),
        "cpu_ms": {
            side: {"all": round(median(whole[side]), 3)}
            | {name: round(median(one.cpu_ms[name] for one in found[side]), 3) for name in found[side][0].cpu_ms}
            for side in SIDES
        },
    }


@contextmanager
def scripted(folder: Path, url: str, step_ms: int, clocked: bool) -> Iterator[dict[str, int]]:
    """Two adapters with scripted engines. Yields their process ids."""
    arguments = ("--folder", str(folder), "--url", url, "--step-ms", str(step_ms))
    if clocked:
        arguments += ("--clocked",)
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
            for what in options.loads:
                chosen = LOADS[what]
                sized = argparse.Namespace(**{**vars(options), "concurrency": chosen.times * options.concurrency})
                step_ms = getattr(options, chosen.option) if chosen.option else chosen.step_ms
                with scripted(folder, server.url, step_ms, chosen.clocked) as pids:
                    processes = {
                        side: {"client": os.getpid(), "adapter": pids[side], "redis": server.pid} for side in SIDES
                    }
                    loads[what] = await rounds(Pair(clients, models, processes, varied=chosen.varied), sized)
            if options.engines:
                with whole(folder, server.url, options.engines):
                    pair = Pair(clients, models, {side: {} for side in SIDES}, settle_s=2.5)
                    loads["model"] = await rounds(pair, options)
    named = ("concurrency", "tokens", "served_ms", "step_ms", "rounds", "seconds")
    sizes = {name: getattr(options, name) for name in named}
    return {"ratio": lowest(loads, model=True), "bound": lowest(loads, model=False), **loads, **sizes}


def lowest(loads: Mapping[str, Mapping[str, Any]], *, model: bool) -> float | None:
    """The lowest ratio of the loads in which a model takes its time, or of the others; None if there is none."""
    found = [one for name, one in loads.items() if (name not in LOADS or LOADS[name].model) is model]
    return min((min(one["submissions"], one["tokens"]) for one in found), default=None)


def load_names(text: str) -> list[str]:
    """The type of an option that takes loads, separated by commas."""
    found = text.split(",")
    if unknown := sorted(set(found) - set(LOADS)):
        raise argparse.ArgumentTypeError(f"unknown loads {unknown} (there are: {', '.join(LOADS)})")
    return found


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=at_least(1), default=32, help="traces at a time")
    parser.add_argument("--tokens", type=at_least(1), default=64, help="tokens of a trace")
    parser.add_argument("--served-ms", type=at_least(1), default=7, help="milliseconds of a step, where served")
    parser.add_argument("--step-ms", type=at_least(0), default=20, help="milliseconds between two tokens, where paced")
    parser.add_argument("--loads", type=load_names, default=[*LOADS], help=f"of {','.join(LOADS)}; by default all")
    parser.add_argument("--rounds", type=at_least(1), default=20, help="rounds of each side")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a round begins new traces")
    parser.add_argument("--engines", metavar="MODEL", help="measure whole engines of this model, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--clocked", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        anyio.run(serve, options.serve, options.folder, options.url, options.step_ms / 1000, options.clocked)
        return
    show(anyio.run(measure, options), as_json=options.json, width=20)


if __name__ == "__main__":
    main()
