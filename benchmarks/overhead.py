"""What streaming a block's saves costs, beside what it would cost otherwise, in one run.

    python -m benchmarks.overhead [--model FOLDER] [--concurrency 16] [--tokens 100] [--rounds 3] [--workload last]
    [--json]

Several ways to run the same requests take turns, each engine in processes of its own:

- *plain*: a stock `AsyncLLM`, no block; eager, and at vLLM's defaults (compiled, with CUDA graphs on a GPU); with
  `--first-runner`, at its defaults but for the model runner, which is the one that nnsight and Tracewire build on;
- *final only*: nnsight's own async engine, as published, whose saves come with the finished output;
- *RPC per output*: the same, with a collect RPC on every output, as nnsight's async design first did it;
- *tracewire*: the same block over the bus, a delta on every output, received and folded by a subscriber in another
  process; *declared*: the same values read by declared interventions, likewise; *steered*: a projection of each layer
  saved and a vector added to it, likewise; and *bystander*: requests with neither, likewise;
- with `--hosted`: *tracewire_host*, the same block on an engine with `--blocks host`; *writing* and *writing_host*, a
  block that changes what it reads, on both; `tracewire_host_to_inline` and `writing_host_to_inline` are ratios of their
  rounds;
- *own*: plain requests on Tracewire's engine without the bus.

Every figure is the median over the rounds. Tokens per second of Tracewire are counted at the subscriber, from the first
submission to the last fold verified. `latency_ms` is from the end of the step that sampled a token to the subscriber's
hands. `wire_ratio` is bytes of all stream entries, tokens and text included, over bytes of the new values themselves.

On a CPU, vLLM binds its workers to cores of their own and Tracewire's adapter keeps off them. Redis and the subscriber
are kept off them here, as an operator would (`docs/sizing.md`); with `--anywhere` they run where the kernel puts them.

On a host with GPUs and cores enough, `--at-once` starts all engines together, and several of these programs (one for
each layout, say) run beside each other with `--turns FILE`: each starts its engines, waits for those of the others, and
then they take turns, so that only one engine at a time has work.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np
import psutil

import tracewire
from benchmarks.kind_cases import KINDS, Shape
from benchmarks.processes import at_least, show
from benchmarks.quantiles import StepTimes, quantiles
from benchmarks.roles import cpu_seconds, sampling, successions
from tracewire_bus.bus import Bus
from tracewire_bus.transport.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]

#: The names of Tracewire's engines: with blocks in its worker, and in hosts.
NAME, HOSTED = "bench", "bench-host"

WORKLOADS: dict[str, dict[str, Any]] = {
    "last": {"saves": "last", "layers": [2], "prompt_tokens": 16},
    "layers": {"saves": "last", "layers": [1, 2, 3, 4], "prompt_tokens": 16},
    "topk": {"saves": "topk", "layers": [], "prompt_tokens": 16},
    "prompt": {"saves": "prompt", "layers": [2], "prompt_tokens": 1024},
    "none": {"saves": "none", "layers": [], "prompt_tokens": 16},
}


@tracewire.intervention
def last(model, tracer, live, layers):
    """The last position of some layers, each step."""
    kept = [].save()
    for _ in tracer.iter[:]:
        for layer in layers:
            kept.append(model.model.layers[layer].output[0][-1].clone())


@tracewire.intervention
def writing(model, tracer, live, layers):
    """Some layers' outputs scaled, and the last position of each kept."""
    kept = [].save()
    for _ in tracer.iter[:]:
        for layer in layers:
            stream = model.model.layers[layer].output[0]
            stream[:] = stream * 1.01
            kept.append(stream[-1].clone())


@tracewire.intervention
def deciding(model, tracer, live, layers):
    """As `writing`, but only the values say whether a layer's output is scaled: it always is."""
    kept = [].save()
    for _ in tracer.iter[:]:
        for layer in layers:
            stream = model.model.layers[layer].output[0]
            if stream[-1, 0] < 1e9:
                stream[:] = stream * 1.01
            kept.append(stream[-1].clone())


@tracewire.intervention
def directed(model, tracer, live, layers, direction):
    """A direction removed from some layers' outputs, and the last position of each kept."""
    kept = [].save()
    unit = direction / direction.norm()
    for _ in tracer.iter[:]:
        for layer in layers:
            stream = model.residual(layer).output
            along = (stream.float() @ unit)[:, None]
            stream[:] = stream - along * unit
            kept.append(stream[-1].clone())


@tracewire.intervention
def topk(model, tracer, live):
    """The five likeliest tokens, each step."""
    kept = [].save()
    for _ in tracer.iter[:]:
        kept.append(model.logits[-1].topk(5).indices.clone())


@tracewire.intervention
def prompt(model, tracer, live, layer):
    """A whole prompt's activations, once."""
    kept = model.model.layers[layer].output[0].clone().save()


def block_of(workload: dict[str, Any], model: tracewire.Model) -> Any:
    """The block of a workload, or none."""
    return {
        "last": lambda: last(layers=workload["layers"]),
        "writing": lambda: writing(layers=workload["layers"]),
        "deciding": lambda: deciding(layers=workload["layers"]),
        "directed": lambda: directed(layers=workload["layers"], direction=_direction(model.info.hidden_size)),
        "topk": lambda: topk,
        "prompt": lambda: prompt(layer=workload["layers"][0]),
    }.get(workload["saves"], lambda: None)()


def _direction(hidden: int) -> Any:
    return np.linspace(-1, 1, hidden, dtype=np.float32)


@cache
def _hundredth(hidden: int) -> Any:
    """A hundredth of that, one array for all traces: as a service keeps its vectors."""
    return _direction(hidden) / 100


#: What kinds need, by the model's name and the layer.
_shapes: dict[tuple[str, int], Shape] = {}


def declared_of(workload: dict[str, Any], model: tracewire.Model) -> list[Any]:
    """The workload's interventions where its block is declared, or none."""
    layers = workload["layers"]
    if "kind" in workload:
        # A client keeps its arrays, so that it digests each once.
        shape = _shapes.setdefault((model.name, layers[0]), Shape(model, layers[0]))
        return KINDS[workload["kind"]].declared(shape)
    vector = _hundredth(model.info.hidden_size)
    match workload["saves"]:
        case "declared:last":
            return [tracewire.Probe(f"kept{layer}", f"model.layers.{layer}") for layer in layers]
        case "declared:topk":
            return [tracewire.LogitLens("kept", "residual(-1)")]
        case "declared:prompt":
            return [tracewire.Probe("kept", f"model.layers.{layers[0]}", positions="prompt")]
        case "steered":
            return [
                one
                for layer in layers
                for one in (
                    tracewire.Probe(f"kept{layer}", f"residual({layer})", weight=vector),
                    tracewire.Steer(f"residual({layer})", vector, scale=0.1),
                )
            ]
    return []


class Role:
    """An engine in a process of its own, answering workloads."""

    def __init__(self, kind: str, options: dict[str, Any], folder: Path, name: str) -> None:
        self.name = name
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.roles", kind, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        self._next("ready")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _next(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and key in line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}; see {self._log.name}")

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """One round; tokens, seconds and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(workload) + "\n")
        self._process.stdin.flush()
        return self._next("tokens")

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def raw_bytes(value: Any) -> int:
    """Bytes of the values themselves."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(raw_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(raw_bytes(item) for item in value)
    return 8


async def tracewire_round(
    url: str, workload: dict[str, Any], name: str = NAME, kept: tracewire.Client | None = None
) -> dict[str, Any]:
    """The workload over the bus: submitted and folded here, in the subscriber's process. `name` is the model's.

    By the client `kept`, if there is one, else by a new one. The first is submitted at the workload's `begin_at`, if
    it has one, by `time.time()`.
    """
    latencies: list[float] = []
    gaps: list[float] = []
    totals = {"tokens": 0, "wire": 0, "raw": 0}
    results: dict[str, tracewire.Result] = {}
    steps: list[float] = []
    firsts: list[float] = []
    #: When the last trace was submitted, the first and the last output came, and the last fold was verified.
    marks = dict.fromkeys(("submitted", "first_output", "last_output", "verified"), 0.0)
    async with nullcontext(kept) if kept is not None else tracewire.connect(url) as client:
        model = await client.models.get(name, timeout=60)
        block, declared = block_of(workload, model), declared_of(workload, model)
        await anyio.sleep(max(0.0, workload.get("begin_at", 0.0) - time.time()))
        began, began_at = time.perf_counter(), time.time()

        async def place(requests: list[dict[str, Any]]) -> None:
            for number, request in enumerate(requests):
                await one(request, first=not number)

        async def one(request: dict[str, Any], *, first: bool) -> None:
            token_ids, params = request["prompt"], sampling(request)
            async with client.trace(model, token_ids, block, interventions=declared, **params) as trace:
                times = StepTimes(gaps)
                marks["submitted"] = time.perf_counter() - began
                async for output in trace:
                    marks["last_output"] = time.perf_counter() - began
                    marks["first_output"] = marks["first_output"] or marks["last_output"]
                    if isinstance(output, tracewire.Output):
                        if first and output.index == 0:
                            firsts.append(output.time)
                        steps.append(output.time)
                        times.note(len(output.token_ids), output.time)
                        latencies.append(time.time() - output.time)
                        totals["tokens"] += len(output.token_ids)
                results[trace.id] = await trace.result()

        async with anyio.create_task_group() as group:
            for requests in successions(workload):
                group.start_soon(place, requests)
        seconds = marks["verified"] = time.perf_counter() - began
    totals["raw"] = sum(raw_bytes(value) for result in results.values() for value in result.saves.values())
    async with Bus.open(url) as bus:
        for trace_id in results if workload.get("count_wire", True) else ():
            totals["wire"] += sum([len(entry.data) async for entry in bus.read(trace_id)])
    # From the first step's end to the last one's, by the worker's clock.
    marks["generating"] = max(steps) - min(steps)
    # How much later the last of them had its first step than the first.
    marks["joined"] = max(firsts) - min(firsts)
    marks_ms = _milliseconds(marks)
    spans = {"began_at": began_at, "ended_at": began_at + seconds, "first_step": min(steps), "last_step": max(steps)}
    spans["last_first"] = max(firsts)
    return {**totals, **spans, "seconds": seconds, "latencies": latencies, "gaps": gaps, "marks_ms": marks_ms}


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What several subscribers, which ran at once, came to together."""
    found: dict[str, Any] = {name: sum(one[name] for one in answers) for name in ("tokens", "wire", "raw")}
    found["seconds"] = max(one["ended_at"] for one in answers) - min(one["began_at"] for one in answers)
    for name in ("latencies", "gaps"):
        found[name] = [seconds for one in answers for seconds in one[name]]
    first, last = min(one["first_step"] for one in answers), max(one["last_step"] for one in answers)
    began = min(one["began_at"] for one in answers)
    marks = {"first_step": first - began, "generating": last - first, "ending": began + found["seconds"] - last}
    found["marks_ms"] = _milliseconds(marks) | {
        "submitted": round(max(1000 * (one["began_at"] - began) + one["marks_ms"]["submitted"] for one in answers), 1),
        "joined": round(1000 * (max(one["last_first"] for one in answers) - first), 1),
    }
    return found


def _milliseconds(marks: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * seconds, 1) for name, seconds in marks.items()}


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """This thread runs on these."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def left_by_workers(engine: int) -> set[int]:
    """The cores on which the adapter under the supervisor `engine` runs."""
    return set.intersection(*(os.sched_getaffinity(child.pid) for child in psutil.Process(engine).children()))


@asynccontextmanager
async def turn(file: Path | None, kind: int = fcntl.LOCK_EX) -> AsyncIterator[None]:
    """Nobody else who names this file measures, and with `LOCK_EX` nobody starts engines either."""
    if file is None:
        yield
        return
    with file.open("wb") as lock:
        await anyio.to_thread.run_sync(fcntl.flock, lock, kind)
        yield


#: How long an engine that ran is let come to rest, in seconds: vLLM's processes spin for one after their last step.
SETTLE_S = 2.5


def start_engine(url: str, options: dict[str, Any], folder: Path, blocks: str = "inline") -> subprocess.Popen[str]:
    """`tracewire engine` as an operator starts it, with blocks in its workers or in hosts."""
    name = NAME if blocks == "inline" else HOSTED
    arguments = ["--blocks", blocks]
    for option, value in options["engine"].items():
        arguments += [f"--{option.replace('_', '-')}", str(value)]
    for tap in options["taps"]:
        arguments += ["--tap", tap]
    arguments += options.get("arguments", [])
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tracewire.cli", "engine", options["model"], "--name", name, "--url", url),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return process
    raise RuntimeError(f"the engine did not start; see {folder / f'{name}.log'}")


def over_the_bus(workload: dict[str, Any], engines: dict[str, int]) -> Iterator[tuple[str, dict[str, Any], str, int]]:
    """The ways of Tracewire's engines: a name, the workload, the model's name and the engine's process id.

    `engines` has the process ids by the models' names.
    """
    inline = engines[NAME]
    yield "tracewire", workload, NAME, inline
    if workload["layers"]:
        yield "declared", {**workload, "saves": f"declared:{workload['saves']}"}, NAME, inline
        yield "steered", {**workload, "saves": "steered"}, NAME, inline
    yield "bystander", {**workload, "saves": "none"}, NAME, inline
    if HOSTED in engines:
        yield "tracewire_host", workload, HOSTED, engines[HOSTED]
        if workload["layers"]:
            writes = {**workload, "saves": "writing"}
            yield "writing", writes, NAME, inline
            yield "writing_host", writes, HOSTED, engines[HOSTED]


async def one_round(
    workload: dict[str, Any],
    roles: dict[str, Role],
    url: str,
    engines: dict[str, int],
    cores: set[int],
    rounds: dict[str, list[dict[str, Any]]],
    settle_s: float,
) -> None:
    """Each way once, `settle_s` after the one before, the figures added to `rounds`; `engines` are the process ids
    of Tracewire's by their models' names.
    """
    ways: list[tuple[str, Any]] = []
    for name, role in roles.items():
        if name != "nnsight":
            ways.append((name, role.run))
            continue
        ways.append(("final_only", role.run))
        ways.append(("rpc_per_output", lambda work, role=role: role.run({**work, "each": True})))
    wanted = workload["concurrency"] * workload["tokens"]
    for name, run in ways:
        await anyio.sleep(settle_s)
        answer = await anyio.to_thread.run_sync(run, workload)
        if answer["tokens"] != wanted:
            raise RuntimeError(f"{name}: {answer['tokens']} of {wanted} tokens")
        rounds.setdefault(name, []).append(answer)
    for name, work, model, process in over_the_bus(workload, engines):
        await anyio.sleep(settle_s)
        before, own = cpu_seconds(process), time.process_time()
        with on_cores(cores):
            answer = await tracewire_round(url, work, model)
        if answer["tokens"] != wanted:
            raise RuntimeError(f"{name}: {answer['tokens']} of {wanted} tokens")
        if bool(answer["raw"]) == (work["saves"] == "none"):
            raise RuntimeError(f"{name}: {answer['raw']} bytes were saved")
        after = cpu_seconds(process)
        answer["cpu_s"] = {kind: round(used - before.get(kind, 0.0), 3) for kind, used in after.items()}
        answer["cpu_s"]["subscriber"] = round(time.process_time() - own, 3)
        rounds.setdefault(name, []).append(answer)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All ways, in alternating rounds; returns the figures."""
    workload = {**WORKLOADS[options.workload], "concurrency": options.concurrency, "tokens": options.tokens}
    if options.layers:
        workload["layers"] = options.layers
    setup: dict[str, Any] = {"model": str(options.model), "engine": {"max_model_len": 2048}, "taps": options.tap}
    if options.dummy:
        # The cache's size is given: engines that start at once disturb each other's profiling of memory.
        setup["engine"] |= {"load_format": "dummy", "gpu_memory_utilization": 0.1}
    setup["engine"]["kv_cache_memory_bytes"] = (4096 if options.dummy else 512) * 1024 * 1024
    setup["arguments"] = ["--model-runner", options.model_runner]
    for option in options.engine:
        name, _, value = option.partition("=")
        setup["engine"][name] = int(value) if value.isdigit() else value
    roles: dict[str, Role] = {}
    rounds: dict[str, list[dict[str, Any]]] = {}
    wanted: list[tuple[str, str, dict[str, Any]]] = []
    if not options.no_eager:
        wanted.append(("plain_eager", "plain", {"eager": True}))
    if not options.no_default:
        wanted.append(("plain_default", "plain", {"eager": False}))
    if options.first_runner:
        wanted.append(("plain_first_runner", "plain", {"eager": False, "first_runner": True}))
    if options.synchronous:
        wanted.append(("plain_synchronous", "plain", {"eager": False, "first_runner": True, "synchronous": True}))
    if not options.no_own:
        wanted.append(("own", "own", {}))
    if not options.only_plain:
        wanted.append(("nnsight", "nnsight", {}))
    engines: dict[str, subprocess.Popen[str]] = {}
    one_by_one = anyio.CapacityLimiter(len(wanted) + 1 if options.at_once else 1)
    async with EmbeddedServer.start() as server:

        async def start_ours(name: str, blocks: str) -> None:
            async with one_by_one:
                print(f"starting: tracewire, blocks {blocks}", file=sys.stderr)
                engines[name] = await anyio.to_thread.run_sync(start_engine, server.url, setup, folder, blocks)

        async def start_role(name: str, kind: str, more: dict[str, Any]) -> None:
            async with one_by_one:
                print(f"starting: {name}", file=sys.stderr)
                roles[name] = await anyio.to_thread.run_sync(Role, kind, {**setup, **more}, folder, name)

        try:
            async with turn(options.turns, fcntl.LOCK_SH), anyio.create_task_group() as group:
                group.start_soon(start_ours, NAME, "inline")
                if options.hosted:
                    group.start_soon(start_ours, HOSTED, "host")
                for one in wanted:
                    group.start_soon(start_role, *one)
            processes = {name: engine.pid for name, engine in engines.items()}
            roles = {name: roles[name] for name, _, _ in wanted}
            cores = os.sched_getaffinity(0) if options.anywhere else left_by_workers(processes[NAME])
            for thread in psutil.Process(server.pid).threads():
                os.sched_setaffinity(thread.id, cores)
            for number in range(options.rounds + 1):
                async with turn(options.turns):
                    await one_round(workload, roles, server.url, processes, cores, rounds, options.settle)
                said = {name: round(found[-1]["tokens"] / found[-1]["seconds"]) for name, found in rounds.items()}
                print(f"round {number}{' (warm-up)' if not number else ''}: {said}", file=sys.stderr)
        finally:
            for engine in engines.values():
                engine.terminate()
            for role in roles.values():
                role.stop()
            for engine in engines.values():
                try:
                    engine.wait(60)
                except subprocess.TimeoutExpired:
                    engine.kill()
    return summary(rounds, options)


def speed_of(one: dict[str, Any]) -> float:
    """Tokens per second of one round."""
    return float(one["tokens"] / one["seconds"])


def baseline_of(options: argparse.Namespace) -> str:
    """The way that all others are compared with."""
    return "plain_default" if options.no_eager or (options.dummy and not options.no_default) else "plain_eager"


def summary(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios; the first round is a warm-up."""
    kept = {name: found[1:] for name, found in rounds.items()}
    speed = {name: median(speed_of(one) for one in found) for name, found in kept.items()}
    base = baseline_of(options)
    baseline, base_rounds = speed[base], kept[base]
    ours = kept["tracewire"]
    figures: dict[str, Any] = {
        "workload": options.workload,
        "concurrency": options.concurrency,
        "tokens": options.tokens,
        "rounds": options.rounds,
        **{name: round(value, 1) for name, value in speed.items()},
        "plain": round(baseline, 1),
        "ratio_to_plain": round(speed["tracewire"] / baseline, 3),
        "ratios_to_plain": {
            name: [round(speed_of(one) / speed_of(base), 3) for one, base in zip(found, base_rounds, strict=True)]
            for name, found in kept.items()
        },
        **{
            f"{name}_to_plain": round(
                median(speed_of(one) / speed_of(base) for one, base in zip(kept[name], base_rounds, strict=True)), 3
            )
            for name in (
                *("declared", "steered", "bystander", "own", "plain_first_runner", "plain_synchronous"),
                *("tracewire_host", "writing", "writing_host"),
            )
            if name in kept
        },
        "latency_ms": quantiles([latency for one in ours for latency in one["latencies"]]),
        "latency_ms_of": {
            name: quantiles([latency for one in found for latency in one["latencies"]])
            for name, found in kept.items()
            if "latencies" in found[0]
        },
        "wire_ratio": round(sum(one["wire"] for one in ours) / max(1, sum(one["raw"] for one in ours)), 3),
        "raw_bytes_a_token": round(sum(one["raw"] for one in ours) / max(1, sum(one["tokens"] for one in ours)), 1),
        "marks_ms": {
            name: {mark: median(one["marks_ms"][mark] for one in found) for mark in found[0]["marks_ms"]}
            for name, found in kept.items()
            if "marks_ms" in found[0]
        },
        "cpu_s": {name: found[-1]["cpu_s"] for name, found in kept.items()},
    }
    for inline in ("tracewire", "writing"):
        if (hosted := f"{inline}_host") in kept:
            pairs = zip(kept[hosted], kept[inline], strict=True)
            figures[f"{hosted}_to_inline"] = round(median(speed_of(one) / speed_of(two) for one, two in pairs), 3)
    for other in ("final_only", "rpc_per_output"):
        if other in speed:
            figures[f"ratio_to_{other}"] = round(speed["tracewire"] / speed[other], 3)
    return figures


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model" / "model")
    parser.add_argument("--concurrency", type=at_least(1), default=16)
    parser.add_argument("--tokens", type=at_least(1), default=100)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="last")
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--tap", action="append", default=[], help="as of `tracewire engine`, for a GPU")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="vLLM's, for all ways: tensor_parallel_size=2",
    )
    parser.add_argument("--dummy", action="store_true", help="random weights; the baseline is vLLM at its defaults")
    parser.add_argument("--no-eager", action="store_true", help="leave the eager baseline out, on a GPU")
    parser.add_argument("--no-default", action="store_true", help="leave vLLM at its defaults out")
    parser.add_argument(
        "--first-runner", action="store_true", help="plain vLLM on its first model runner as well, on a GPU"
    )
    parser.add_argument(
        "--synchronous", action="store_true", help="plain vLLM on its first runner without async scheduling as well"
    )
    parser.add_argument(
        "--hosted", action="store_true", help="an engine with --blocks host, and blocks that write, besides"
    )
    parser.add_argument(
        "--model-runner",
        choices=("auto", "first", "second"),
        default="auto",
        help="as of `tracewire engine`; plain vLLM chooses",
    )
    parser.add_argument("--settle", type=float, default=SETTLE_S, metavar="SECONDS", help="between two ways")
    parser.add_argument("--no-own", action="store_true", help="leave Tracewire's engine without the bus out")
    parser.add_argument("--only-plain", action="store_true", help="leave nnsight's own ways out")
    parser.add_argument("--anywhere", action="store_true", help="Redis and the subscriber on any core")
    parser.add_argument(
        "--at-once", action="store_true", help="start all engines together, on a host with cores enough"
    )
    parser.add_argument("--turns", type=Path, metavar="FILE", help="take turns with others that name this file")
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    if options.no_eager and options.no_default:
        parser.error("--no-eager, --no-default: expected at most one of them, since the other is the baseline")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = anyio.run(measure, options, folder)
    show(figures, as_json=options.json, width=24)


if __name__ == "__main__":
    main()
