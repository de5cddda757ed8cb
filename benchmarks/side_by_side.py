"""Plain vLLM and Tracewire's engine in processes of their own, which stay up and take turns at many workloads."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import psutil

from benchmarks.core_time import CoreTime
from benchmarks.overhead import (
    ROOT,
    Role,
    left_by_workers,
    merged,
    on_cores,
    speed_of,
    start_engine,
    tracewire_round,
    turn,
)
from benchmarks.processes import at_least
from benchmarks.quantiles import quantiles
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

__all__ = [
    "SideBySide",
    "add_options",
    "described",
    "engine_setup",
    "figures",
    "layer_count",
    "measured",
    "ratios",
    "side_by_side",
]


def add_options(parser: argparse.ArgumentParser, *, requests: list[int], rounds: int, settle: float) -> None:
    """The options of all benchmarks that use `side_by_side`, with some of their defaults."""
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model" / "model")
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=requests)
    parser.add_argument("--tokens", type=at_least(1), default=128, help="of each request")
    parser.add_argument("--rounds", type=at_least(1), default=rounds, help="behind one to warm up")
    parser.add_argument("--settle", type=float, default=settle, metavar="SECONDS", help="between two ways")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="vLLM's, for all ways")
    parser.add_argument("--tap", action="append", default=[], help="as of `tracewire engine`, for a GPU")
    parser.add_argument("--adapters", type=at_least(1), help="as of `tracewire engine`")
    parser.add_argument(
        "--model-runner",
        choices=("auto", "first", "second"),
        default="auto",
        help="as of `tracewire engine`; plain vLLM chooses",
    )
    parser.add_argument("--subscribers", type=at_least(1), default=1, help="how many processes submit and follow")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--at-once", action="store_true", help="start both engines together, with cores enough")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="take turns with others that name this file")
    parser.add_argument("--logs", type=Path, default=None, help="a folder for the engines' logs")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def layer_count(model: Path) -> int:
    """Decoder layers of the model in a folder."""
    found: int = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return found


def engine_setup(options: argparse.Namespace) -> dict[str, Any]:
    """What both engines are started with: `engine` are vLLM's options, `arguments` are only Tracewire's."""
    setup: dict[str, Any] = {"model": str(options.model), "engine": {"max_model_len": 2048}, "taps": options.tap}
    if options.dummy:
        setup["engine"] |= {"load_format": "dummy", "gpu_memory_utilization": 0.1}
    setup["arguments"] = [] if options.adapters is None else ["--adapters", str(options.adapters)]
    setup["arguments"] += ["--model-runner", options.model_runner]
    setup["engine"]["kv_cache_memory_bytes"] = (8192 if options.dummy else 512) * 1024 * 1024
    # vLLM's default on a CPU is fewer.
    setup["engine"]["max_num_seqs"] = max(options.requests)
    for option in options.engine:
        name, _, value = option.partition("=")
        setup["engine"][name] = int(value) if value.isdigit() else value
    return setup


def described(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures of all benchmarks say of the options."""
    names = ("tokens", "rounds", "adapters", "model_runner", "subscribers")
    return {"model": options.model.name, **{name: getattr(options, name) for name in names}}


#: In how many seconds subscribers begin that are told to: by then each has read its workload.
_BEGIN_S = 0.1


@dataclass
class SideBySide:
    """The engines.

    Attributes:
        url: of their Redis.
        settle: seconds before each round.
        engine: the process id of Tracewire's.
        plain: plain vLLM.
        subscribers: processes that submit and follow requests; this one does if there are none.
        cores: those that the engines' workers leave.
    """

    url: str
    settle: float
    engine: int = 0
    plain: Role | None = None
    subscribers: list[Role] = field(default_factory=list)
    cores: set[int] = field(default_factory=set)

    async def plain_round(self, workload: dict[str, Any]) -> dict[str, Any]:
        """The workload's requests on plain vLLM."""
        assert self.plain is not None
        await anyio.sleep(self.settle)
        core = CoreTime(self.plain.pid)
        answer = await anyio.to_thread.run_sync(self.plain.run, {**workload, "saves": "none"})
        return {**answer, "core_ms": core.ms(_generated(workload))}

    async def our_round(self, workload: dict[str, Any], *, saves: bool) -> dict[str, Any]:
        """The workload over the bus. `saves` says whether it saves anything.

        Raises:
            RuntimeError: tokens are missing, or values are saved where none should be, or the other way round.
        """
        await anyio.sleep(self.settle)
        core = CoreTime(self.engine)
        answer = await self.watched(workload)
        answer["core_ms"] = core.ms(_generated(workload))
        wanted = workload["concurrency"] * _generated(workload)
        if answer["tokens"] != wanted:
            raise RuntimeError(f"{workload['saves']}: {answer['tokens']} of {wanted} tokens")
        if bool(answer["raw"]) != saves:
            raise RuntimeError(f"{workload['saves']}: {answer['raw']} bytes were saved")
        await self.drop_streams()
        return answer

    async def watched(self, workload: dict[str, Any]) -> dict[str, Any]:
        """The workload over the bus, by all subscribers together."""
        with on_cores(self.cores):
            if not self.subscribers:
                return await tracewire_round(self.url, workload)
            answers: list[dict[str, Any]] = []

            common = {**workload, "begin_at": time.time() + _BEGIN_S}

            async def one(place: int) -> None:
                share = {**common, "share": (place, len(self.subscribers))}
                answers.append(await anyio.to_thread.run_sync(self.subscribers[place].run, share))

            async with anyio.create_task_group() as group:
                for place in range(min(len(self.subscribers), workload["concurrency"])):
                    group.start_soon(one, place)
            return merged(answers)

    async def drop_streams(self) -> None:
        """Delete the streams of finished traces: Redis would have gigabytes of them after a few rounds."""
        async with Bus.open(self.url) as bus:
            await bus.finished.drop_beyond(1, 0)


def _generated(workload: dict[str, Any]) -> int:
    """How many tokens each place of a workload generates."""
    return int(workload["tokens"] * workload.get("turnover", 1))


@asynccontextmanager
async def side_by_side(
    options: argparse.Namespace, setup: dict[str, Any], folder: Path, *, apart: bool = False
) -> AsyncIterator[SideBySide]:
    """Engines with the options of `add_options`, ready, and stopped at the end.

    Args:
        options: the options.
        setup: by `engine_setup`.
        folder: for their logs.
        apart: whether a single subscriber is a process of its own, too.
    """
    processes: list[subprocess.Popen[str]] = []
    roles: list[Role] = []
    async with EmbeddedServer.start() as server:
        found = SideBySide(server.url, options.settle)

        async def start_ours() -> None:
            processes.append(await anyio.to_thread.run_sync(start_engine, server.url, setup, folder))

        async def start_plain() -> None:
            found.plain = await anyio.to_thread.run_sync(Role, "plain", {**setup, "eager": False}, folder, "plain")
            roles.append(found.plain)

        try:
            async with turn(options.turns, fcntl.LOCK_SH), anyio.create_task_group() as group:
                if options.at_once:
                    group.start_soon(start_ours)
                    group.start_soon(start_plain)
                else:
                    await start_ours()
                    await start_plain()
            found.engine = processes[0].pid
            found.cores = left_by_workers(found.engine)
            for thread in psutil.Process(server.pid).threads():
                os.sched_setaffinity(thread.id, found.cores)
            with on_cores(found.cores):
                for number in range(options.subscribers if apart or options.subscribers > 1 else 0):
                    roles.append(Role("subscriber", {"url": server.url}, folder, f"subscriber-{number}"))
                    found.subscribers.append(roles[-1])
            yield found
        finally:
            for process in processes:
                process.terminate()
            for role in roles:
                role.stop()
            for process in processes:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()


def measured(measure: Callable[..., Awaitable[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures that `measure(options, folder)` comes to. `folder` is for the engines' logs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return anyio.run(measure, options, folder)


def figures(rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """What one way came to in these rounds, each beside the plain one in `base`."""
    # The mark is in tenths of a millisecond: outputs of a short round may all be of one step.
    made = [
        1000 * one["tokens"] / max(0.1, one["marks_ms"]["generating"]) / speed_of(first)
        for one, first in zip(rounds, base, strict=True)
    ]
    latencies = quantiles([latency for one in rounds for latency in one["latencies"]])
    to_plain = ratios(rounds, base)
    return {
        "plain": round(median(map(speed_of, base)), 1),
        "to_plain": round(median(to_plain), 3),
        "least": round(min(to_plain), 3),
        "most": round(max(to_plain), 3),
        "made_to_plain": round(median(made), 3),
        "mb_s": round(median(one["raw"] / 1e6 / one["seconds"] for one in rounds), 2),
        **{f"{name}_ms": value for name, value in latencies.items()},
    }


def ratios(rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> list[float]:
    """Tokens a second in each round, relative to those of the round in `base` beside it."""
    return [speed_of(one) / speed_of(first) for one, first in zip(rounds, base, strict=True)]
