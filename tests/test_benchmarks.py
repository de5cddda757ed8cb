"""Every benchmark runs, in small, and what it prints makes sense: no figure is zero or none that should not be."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kind_cases import KINDS
from tests.support.adapter_command import module_command
from tests.support.engine_process import EngineProcess

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
#: What the others import.
HELPERS = {
    "__init__",
    "core_time",
    "kind_cases",
    "nnsight_cpu",
    "processes",
    "quantiles",
    "roles",
    "scripted",
    "side_by_side",
    "thread_account",
}
QUANTILES = {"p50", "p95", "p99"}

own_engine = pytest.mark.usefixtures("starts_engine")


def run(module: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.MODULE ARGUMENTS`, which has ended with this status."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=500)
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def figures(module: str, *arguments: str, differences: bool = False) -> Any:
    """The JSON object that it ends with, in which every number is finite.

    None is negative, unless some are `differences` of two measurements: in small, those drown in noise.
    """
    return checked(run(module, *arguments, "--json").stdout, differences=differences)


def figures_of_a_fork(folder: Path, module: str, *arguments: str) -> Any:
    """`figures` of a benchmark that imports vLLM, in a process that has."""
    done = module_command(folder, f"benchmarks.{module}", *arguments, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    return checked(done.stdout)


def checked(said: str, *, differences: bool = False) -> Any:
    """The JSON object that a benchmark's output ends with."""
    found = json.loads(said.splitlines()[-1])
    for number in numbers(found):
        assert math.isfinite(number), found
        assert differences or number >= 0, found
    return found


def numbers(value: Any) -> list[float]:
    """All numbers in it."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def above_zero(found: dict[str, Any], *names: str) -> None:
    """All numbers under these names are."""
    for name in names:
        assert numbers(found[name]), name
        assert all(number > 0 for number in numbers(found[name])), (name, found[name])


def in_order(latency: dict[str, float]) -> None:
    """These are quantiles of something that took time."""
    assert latency.keys() >= QUANTILES
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]


def test_every_benchmark_is_run_by_a_test_of_this_file() -> None:
    source = Path(__file__).read_text()
    for path in BENCHMARKS.glob("*.py"):
        if path.stem not in HELPERS:
            ran = (f'figures("{path.stem}"', f'figures_of_a_fork(tmp_path, "{path.stem}"', f'run("{path.stem}"')
            assert any(call in source for call in ran), path.name


@pytest.mark.parametrize("module", ["autoencoders", "blobs", "kinds", "overhead", "soak", "steering", "volume"])
def test_one_that_needs_an_engine_imports_and_says_what_it_takes(module: str) -> None:
    """The others are run in every case."""
    assert f"{module}.py [-h]" in run(module, "--help").stdout


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("bursts", ["--bursts", "2"], "--bursts: expected a whole number of at least 3, got '2'"),
        ("overhead", ["--no-eager", "--no-default"], "expected at most one of them"),
        ("volume", ["--layers", "some"], "--layers: expected a number from 1 on, or all, got 'some'"),
        ("kinds", ["--layer", "8"], "--layer: expected a layer from 0 to 7, got 8"),
        ("kinds", ["--kinds", "Steering"], "invalid choice: 'Steering'"),
        ("steering", ["--steers", "0"], "--steers: expected a whole number of at least 1, got '0'"),
    ],
)
def test_a_size_too_small_to_measure_is_refused(module: str, arguments: list[str], said: str) -> None:
    assert said in run(module, *arguments, status=2).stderr


# --- without an engine ------------------------------------------------------------------------------------------------

BUS = ("--traces", "2", "--subscribers", "2", "--processes", "2", "--rate", "20", "--seconds", "1", "--rounds", "1")


@pytest.mark.parametrize(
    "options",
    [("--tracing",), pytest.param(("--spread", "--text-only"), marks=pytest.mark.full)],
    ids=["folded, with spans", "spread, text only"],
)
def test_bus(options: tuple[str, ...]) -> None:
    found = figures("bus", *BUS, *options)
    assert found["outputs_sent"] == found["outputs_received_by_each"] == 40
    assert found["lost"] == 0
    assert found["folds_verified"] == found["folds"] == 4
    assert 0 < found["entries_per_output"] <= 1.5
    assert found["wire_ratio"] > 1
    for latency in ("latency_ms", "bare_ms", "bare_loaded_ms"):
        in_order(found[latency])
    # The pacer's work is less than a hundredth of a second.
    del found["cpu_s"]["pacer"]
    above_zero(found, "cpu_s", "cpu_us")


def test_blocking() -> None:
    found = figures("blocking", "--outputs", "5", "--calls", "3", "--rounds", "1")
    assert found.keys() == {"items", "text", "result", "calls"}
    above_zero(found, *found)


def test_bus_of_declared_reads() -> None:
    found = figures("bus", *BUS, "--layers", "3")
    assert found["outputs_sent"] == found["outputs_received_by_each"] == 40
    assert found["lost"] == 0
    assert found["folds_verified"] == found["folds"] == 4
    # Of 12 KiB a token, the rest of an entry is little.
    assert 1 < found["wire_ratio"] < 1.05


@pytest.mark.full
def test_bus_sweep() -> None:
    found = figures("bus", *BUS, "--sweep")
    assert found["tried"][0]["rate"] == 20
    assert all(one["lost"] == 0 and one["folds_verified"] == one["folds"] > 0 for one in found["tried"])
    assert found["keeps_up_at"] in [None, *(one["rate"] for one in found["tried"])]


def test_the_bus_says_by_its_status_that_an_output_was_lost() -> None:
    from benchmarks.bus import nothing_lost

    good = {"outputs_sent": 8, "lost": 0, "folds": 2, "folds_verified": 2}
    assert nothing_lost(good)
    assert nothing_lost({"tried": [good, good]})
    for change in ({"lost": 1}, {"folds_verified": 1}, {"outputs_sent": 0}, {"folds": 0, "folds_verified": 0}):
        assert not nothing_lost(good | change)
        assert not nothing_lost({"tried": [good, good | change]})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--rest", "0.05"), marks=pytest.mark.full, id="apart"),
        pytest.param(("--steered", "--rest", "0", "--keep-client"), id="steered, at once"),
    ],
)
def test_bursts(options: tuple[str, ...]) -> None:
    found = figures("bursts", "--traces", "3", "--bursts", "4", *options)
    above_zero(found, "first", "last", "submitted", "ended", "client", "adapter", "redis")
    assert found["first"] <= found["last"] <= found["ended"]
    assert ("rate" in found) == ("0" in options)


def test_fleet() -> None:
    sizes = ("--traces", "6", "--steady", "4", "--engines", "2", "--capacity", "2", "--clients", "2")
    found = figures("fleet", *sizes, "--rounds", "0", "--pace", "100")
    assert [phase["name"] for phase in found] == ["burst", "steady", "changing"]
    assert [phase["traces"] for phase in found] == [2, 4, 6]
    for phase in found:
        assert phase["violations"] == []
        assert phase["finished"] == phase["attempts"] == phase["traces"]
        assert sum(count for count, _, _ in phase["engines"].values()) == phase["traces"]
        assert 0 < phase["accept_p50"] <= phase["accept_p99"] <= phase["accept_max"]
        above_zero(phase, "seconds")


def test_sizing() -> None:
    found = figures("sizing", "--idle", "2", "--seconds", "1", "--traces", "12", "--engines", "20", differences=True)
    assert set(found) == {"idle engine", "trace", "registry", "looking after"}
    above_zero(found["idle engine"], "connections", "commands", "bytes")
    above_zero(found["trace"], "cpu_us", "client_connections")
    above_zero(found["registry"], "whole_bytes", "heartbeat_bytes", "memory", "first_look_ms", "look_ms", "look_bytes")
    assert found["registry"]["engines"] == 20
    assert found["registry"]["heartbeat_bytes"] < found["registry"]["whole_bytes"]
    assert (found["looking after"]["engines"], found["looking after"]["running"]) == (2, 64)


def test_blocks(tmp_path: Path) -> None:
    found = figures_of_a_fork(tmp_path, "blocks", "--requests", "2", "--tokens", "6", "--hidden", "16", "--rounds", "1")
    above_zero(found, "scope", "tap", "passed", "report", "step", "end")
    assert found["step"] >= max(found[part] for part in ("scope", "tap", "passed", "report"))


@pytest.mark.parametrize("way", ["declared", "steered", "own"])
def test_plans(way: str, tmp_path: Path) -> None:
    found = figures_of_a_fork(tmp_path, "plans", "--requests", "3", "--layers", "2", "--way", way, "--rounds", "1")
    assert (found["requests"], found["layers"], found["way"]) == (3, 2, way)
    for steps in (found["same_us"], found["changed_us"]):
        above_zero(steps, "plan", "serve", "report", "adapter")


def test_scheduling(tmp_path: Path) -> None:
    found = figures_of_a_fork(tmp_path, "scheduling", "--requests", "2", "--tokens", "4", "--rounds", "1")
    above_zero(found, "vllm_us", "tracewire_us", "ratio")
    assert found["ratio"] == pytest.approx(found["tracewire_us"] / found["vllm_us"], rel=0.05)


# --- on the shared engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["blocks", "plain"])
def test_soak(engine: EngineProcess, engine_bus: str, options: tuple[str, ...]) -> None:
    pid = str(engine.process.pid)
    lines = run("soak", "--url", engine_bus, "--engine-pid", pid, "--traces", "14", *options).stdout.splitlines()
    assert len(lines) == 14
    assert lines[-1].startswith("    14 traces, ")
    # Resident memory of each process, in MiB.
    assert "'client': " in lines[-1]
    assert "': 0.0" not in lines[-1]


def test_soak_at_full_volume(engine: EngineProcess, engine_bus: str) -> None:
    lines = run(
        "soak", "--url", engine_bus, "--engine-pid", str(engine.process.pid), "--seconds", "3"
    ).stdout.splitlines()
    assert len(lines) == 10
    assert "'client': " in lines[-1]
    assert float(lines[-1].partition(" traces, ")[2].partition(" MB")[0]) > 0


def test_the_plot_of_volume_is_drawn_from_its_figures(tmp_path: Path) -> None:
    figures = ROOT / "docs" / "figures"
    run("volume_plot", str(figures / "volume.json"), str(tmp_path / "volume.svg"))
    drawn, shown = (tmp_path / "volume.svg").read_text(), (figures / "volume.svg").read_text()
    values = re.compile(r">(\d\.\d\d)</text>")
    assert values.findall(drawn) == values.findall(shown)
    assert len(values.findall(drawn)) > 10


# --- with engines of their own ----------------------------------------------------------------------------------------


@own_engine
@pytest.mark.full
def test_harvest() -> None:
    sizes = ("--prompts", "8", "--tokens", "8", "--concurrency", "4", "--rounds", "2")
    found = figures("harvest", *sizes, "--stock", "--engine", "max_model_len=512")
    assert list(found) == ["stock", "http", "traces", "last", "harvest", "parquet", "disk", "goal"]
    for one in found.values():
        assert len(one["ratios"]) == 2
        above_zero(one, "ratio", "ratios")
    for name in ("harvest", "disk"):
        above_zero(found[name], "tokens_per_second", "megabytes_per_second")
    above_zero(found["goal"], "plain", "disk", "harvest")
    assert found["goal"]["less"] in ("plain", "disk")


def test_gateway() -> None:
    sizes = ("--streams", "2", "--tokens", "5", "--rounds", "1", "--rate", "50")
    found = figures("gateway", *sizes, differences=True)
    assert (found["engine"], found["streams"]) == ("scripted", 2)
    above_zero(found, "to_sdk", "sdk_tokens_s", "gateway_tokens_s", "sdk_p50_ms")
    assert {"added_p50_ms", "added_p99_ms"} < found.keys()


def test_gateway_with_idle_streams() -> None:
    found = figures("gateway", "--idle", "20")
    assert found["streams"] == 20
    above_zero(found, "kib_a_stream")


@own_engine
@pytest.mark.full
def test_gateway_before_an_engine() -> None:
    found = figures("gateway", "--engine", "demo", "--streams", "2", "--tokens", "5", "--rounds", "1", differences=True)
    above_zero(found, "to_sdk", "sdk_tokens_s", "gateway_tokens_s")


@own_engine
@pytest.mark.full
@pytest.mark.parametrize("blocks", ["inline", "host"])
def test_volume(blocks: str) -> None:
    sizes = ("--requests", "1", "2", "--layers", "1", "all", "--tokens", "16", "--rounds", "1", "--settle", "0.2")
    more = ("--wake", "--limit", "1", "--turnover", "2") if blocks == "host" else ()
    found = figures("volume", "--quick", *sizes, "--seconds", "0.2", "--blocks", blocks, *more)
    assert (found["blocks"], found["turnover"]) == (blocks, 2 if more else 1)
    ways = ["block", "declared", "steered"]
    wanted = [(way, n, 1) for n in (1, 2) for way in [*ways, "none"]] + [(way, n, 8) for n in (1, 2) for way in ways]
    assert sorted((one["way"], one["requests"], one["layers"]) for one in found["cells"]) == sorted(wanted)
    for one in found["cells"]:
        above_zero(one, "plain", "to_plain", "p50_ms", "growth")
        for core in (one["core_ms"], one["plain_core_ms"]):
            above_zero(core, "ran", "slept", "other_threads", "other_processes")
        for step in (one["step_ms"], one["plain_step_ms"]):
            above_zero(step, "p10", "p50")
            assert step["p10"] <= step["p50"]
        assert one["rounds"] == 1
        assert one["least"] == one["to_plain"] == one["most"]
        assert one["p50_ms"] <= one["p95_ms"] <= one["p99_ms"]
        assert bool(one["mb_s"]) == (one["way"] != "none") or one["way"] == "steered"
    assert [one["bytes"] for one in found["raw"]] == [512, 4096, 65536]
    for one in found["raw"]:
        above_zero(one, "mb_s")


@own_engine
@pytest.mark.full
def test_kinds() -> None:
    found = figures("kinds", "--requests", "1", "2", "--tokens", "12", "--rounds", "1", "--settle", "0.1")
    assert found["untapped"] == {}
    assert found["layer"] == 4
    assert [(one["requests"], one["kind"]) for one in found["cells"]] == [
        (requests, kind) for requests in (1, 2) for kind in ["none", *KINDS]
    ]
    for one in found["cells"]:
        above_zero(one, "plain", "to_plain", "made_to_plain", "least", "most", "p50_ms")
        assert one["least"] == one["to_plain"] == one["most"]
        assert one["p50_ms"] <= one["p95_ms"] <= one["p99_ms"]
        if one["kind"] != "none":
            above_zero(one, "to_none")
            assert bool(one["mb_s"]) <= KINDS[one["kind"]].saves


@own_engine
@pytest.mark.full
@pytest.mark.parametrize("architecture", ["relu", "topk"])
def test_autoencoders(architecture: str) -> None:
    size = ("--features", "600", "--requests", "1", "2", "--tokens", "8", "--rounds", "1")
    found = figures("autoencoders", "--architecture", architecture, *size)
    assert len(found) == 6
    for one in found.values():
        above_zero(one, "split_to_whole", "split_to_none", "whole_to_none")
        assert one["least"] == one["split_to_whole"] == one["most"]


@own_engine
@pytest.mark.full
@pytest.mark.parametrize("form", ["block", "declared"])
def test_steering(form: str) -> None:
    found = figures("steering", "--concurrency", "1", "2", "--steers", "3", "--form", form)
    assert found["form"] == form
    assert [one["n"] for one in found["concurrency"]] == [1, 2]
    for one in found["concurrency"]:
        assert one["asked"] == 3 * one["n"]
        assert 0 < one["steers"] <= one["asked"] - one["too_late"]
        above_zero(one, "steps_p50", "steps_p99", "ms_p50", "ms_p99", "step_ms", "engine_steps_p50", "engine_steps_max")
        assert one["steps_p50"] <= one["steps_p99"]
        assert one["ms_p50"] <= one["ms_p99"]
        assert one["engine_steps_p50"] <= one["engine_steps_p99"] <= one["engine_steps_max"]


def check_policy(*more: str, served: Sequence[str], bound: Sequence[str]) -> None:
    sizes = ("--concurrency", "2", "--tokens", "4", "--served-ms", "1", "--step-ms", "1", "--rounds", "2")
    found = figures("policy", *sizes, "--seconds", "0.3", *more)
    for figure, loads in (("ratio", served), ("bound", bound)):
        expected = [found[load][what] for load in loads for what in ("submissions", "tokens")]
        assert found[figure] == min(expected, default=None)
    for load in (*served, *bound):
        above_zero(found[load], "submissions", "tokens", "submissions_per_s", "tokens_per_s")
        for side in ("on", "off"):
            expected_tokens = 4 * found[load]["submissions_per_s"][side]
            assert found[load]["tokens_per_s"][side] == pytest.approx(expected_tokens, rel=0.5)
            if load != "model":
                assert found[load]["cpu_ms"][side].keys() == {"all", "client", "adapter", "redis"}


def test_policy() -> None:
    check_policy(served=["served", "paced"], bound=["full", "busy"])


def test_policy_of_one_load() -> None:
    check_policy("--loads", "served", served=["served"], bound=[])


@own_engine
@pytest.mark.full
def test_policy_of_whole_engines() -> None:
    check_policy("--engines", "demo", served=["served", "paced", "model"], bound=["full", "busy"])


def test_hosts() -> None:
    found = figures("hosts", "--tenants", "2", "--steps", "3")
    above_zero(found, "host_mb", "step_ms", "hosts_running")


def test_host_steps() -> None:
    found = figures("host_steps", "--traces", "40", "--steps", "5", "--rounds", "1", "--parts", "5")
    assert found.keys() == {f"{way}, 40, {hosts}" for way in ("reads", "writes") for hosts in (1, 2)}
    for one in found.values():
        above_zero(one, "to_plain", "least", "most", "hosts")
        assert one["least"] <= one["to_plain"] <= one["most"]
        assert len(one["parts"]) == 5
    assert [one["hosts"] for one in found.values()] == [1, 2, 1, 2]


def test_starts() -> None:
    found = figures("starts", "--no-up", "--rounds", "1")["commands"]
    assert found["tracewire --version"]["cpu_ms"] >= found["python -c pass"]["cpu_ms"] > 0


@own_engine
@pytest.mark.full
def test_starts_to_the_first_token() -> None:
    found = figures("starts", "--rounds", "1")["up"]
    assert 0 < found["ready_s"] < found["first_token_s"]
    assert found["plain_vllm_s"] > 0


def test_guards() -> None:
    found = figures("guards", "--traces", "8", "--tokens", "40", "--step-ms", "20")
    assert found["alarms"] > 0
    assert found["missed"] == 0
    in_order(found["asked_ms"])
    in_order(found["paused_ms"])


@own_engine
@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--inline",)], ids=["blobs", "inline"])
def test_blobs(options: tuple[str, ...]) -> None:
    sizes = ("--megabytes", "2", "--traces", "2", "--tokens", "30", "--rounds", "1")
    found = figures("blobs", *sizes, *options)
    assert (found["bytes"], found["traces"], found["tokens"], found["rounds"]) == (2 << 20, 2, 30, 1)
    for way in ("alone", "made", "saved", "loaded"):
        above_zero(found[way], "tokens_per_s", *(["large_trace_s"] if way != "alone" else []))
        for measured in ("latency_ms", "gap_ms", "ping_ms"):
            in_order(found[way][measured])
    assert found["to_alone"].keys() == {"made", "saved", "loaded"}
    above_zero(found, "to_alone")


@own_engine
@pytest.mark.full
def test_speculation() -> None:
    sizes = ("--concurrency", "2", "--tokens", "24", "--rounds", "1", "--undrafted")
    found = figures("speculation", *sizes)
    above_zero(found, "tokens_per_second", "own_to_plain", "drafted_to_undrafted", "acceptance")
    assert found["equal"]
    assert found["acceptance"]["own"] == found["acceptance"]["plain"] <= 1
    above_zero(figures("speculation", *sizes[:-1], "--declared"), "tokens_per_second", "declared_to_undrafted")


@own_engine
@pytest.mark.full
def test_overhead() -> None:
    sizes = ("--concurrency", "2", "--tokens", "8", "--rounds", "1", "--settle", "0.2")
    found = figures("overhead", *sizes, "--no-default")
    ways = {"plain_eager", "own", "final_only", "rpc_per_output", "tracewire", "declared", "steered", "bystander"}
    above_zero(found, *ways, "plain", "raw_bytes_a_token")
    assert found["ratios_to_plain"].keys() == ways
    above_zero(found, "ratios_to_plain", *(name for name in found if name.startswith("ratio_to_")))
    above_zero(found, *(f"{way}_to_plain" for way in ("declared", "steered", "bystander", "own")))
    assert found["ratios_to_plain"]["plain_eager"] == [1.0]
    assert found["wire_ratio"] > 1
    in_order(found["latency_ms"])
    assert found["latency_ms_of"].keys() == {"tracewire", "declared", "steered", "bystander"}
    assert found["cpu_s"].keys() == ways
