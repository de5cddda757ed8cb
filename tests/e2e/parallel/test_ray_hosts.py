"""Engines over two hosts, and what becomes of them when one is cut off. The hosts are network namespaces (`hosts.py`).

Two hosts are a Ray cluster with room for one rank each. The adapter is on a third one that joins the cluster by its
address, or on the cluster's head.
"""

# ruff: noqa: ASYNC110
from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import psutil
import pytest
import yaml

import tracewire
from examples.two_hosts.run import TOKENS, walk
from tests.support import ROOT
from tests.support.blocks import parallel as blocks
from tests.support.blocks.hosts import scaled_by
from tests.support.engine_process import BLOB_THRESHOLD, ENVIRONMENT, EngineProcess
from tests.support.parallel.hosts import BIN, RAY_PORT, TOKEN, Cluster, Host, Switch, named, switch
from tests.support.parallel.scenarios import GREEDY, PROMPT, SCENARIOS, TIES, check_restarted, outcome, same
from tests.support.scripted_engine import ScriptedEngine, serving
from tracewire import Client, Model, Output
from tracewire_bus.bus import Bus

pytestmark = [pytest.mark.usefixtures("starts_engine"), pytest.mark.full]

#: How long workers and adapter wait for each other here, in seconds.
PATIENCE_S = 8

LAYOUTS = {"tensor parallel": ("--tensor-parallel-size", "2"), "pipeline": ("--pipeline-parallel-size", "2")}

#: How far values may be off: tensor-parallel ranks sum bfloat16 in another order.
TOLERANCES = {"tensor parallel": 0.05, "pipeline": 0.02}


class EngineCluster(Cluster):
    """And engines over them."""

    @contextmanager
    def engine(self, on: Host, address: str, *options: str) -> Iterator[Path]:
        """An engine with its adapter `on` a host; its log."""
        log = self.folder / f"engine-{time.monotonic_ns()}.log"
        command = [
            sys.executable,
            "-m",
            "tracewire.cli",
            "engine",
            "demo",
            "--code",
            "any",
            "--url",
            self.switch.hosts_url,
        ]
        backend = ["--distributed-executor-backend", "ray", "--ray-address", address, "--restarts", "0"]
        limits = ["--worker-patience", str(PATIENCE_S), "--block-timeout", "3", "--blob-threshold", str(BLOB_THRESHOLD)]
        environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        process = on.start([*command, *backend, *limits, *options], log, environment)
        try:
            until = time.monotonic() + 200
            while not re.search("^ready ", log.read_text(), re.MULTILINE):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the engine did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.2)
            yield log
        finally:
            for one in engine_processes(on):
                one.terminate()
            process.wait(60)


def engine_processes(host: Host) -> list[psutil.Process]:
    """The engine's supervisor on a host."""
    return named(host, "tracewire.cli engine")


def last_words(host: Host) -> str:
    """Why workers of a host ended themselves."""
    command = host.inside(["grep", "-rhs", "this worker ends", "/tmp/ray"])
    return subprocess.run(command, capture_output=True, text=True).stdout


async def until_none(host: Host, words: str, seconds: float) -> float:
    """Wait until a host has no such process any more; how long it took, in seconds."""
    began = time.monotonic()
    with anyio.fail_after(seconds):
        while await anyio.to_thread.run_sync(named, host, words):
            await anyio.sleep(0.2)
    return time.monotonic() - began


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """How the two ranks stand to each other."""
    return str(request.param)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EngineCluster]:
    """A cluster of this test's own: it is cut."""
    with switch(tmp_path) as laid:
        yield EngineCluster(laid, tmp_path)


async def cut_off(cluster: EngineCluster, client: Client, model: Model, host: Host) -> None:
    """A trace in whose middle a host is cut off, and which another engine of the model finishes, a scripted one."""
    async with (
        Bus.open(cluster.switch.url) as bus,
        client.trace(model, PROMPT, **GREEDY, max_tokens=400) as trace,
    ):
        (described,) = await bus.registry.list()
        other = msgspec.structs.replace(described, engine="someone-else", capacity=64)
        async for item in trace:
            if isinstance(item, Output) and item.index >= 4:
                break
        await anyio.to_thread.run_sync(host.cut)
        async with serving(bus, ScriptedEngine(partial(anyio.sleep, 0.01)), other, heartbeat_s=1.0):
            with anyio.fail_after(PATIENCE_S + 40):
                result = await trace.result()
        events = [event async for event in client.subscribe(trace.id, since="start")]
    check_restarted(events)
    assert result.status == "finished"
    assert len(result.token_ids) == 400


@pytest.mark.timeout(900)
async def test_a_host_with_a_rank_is_cut_off(
    cluster: EngineCluster, layout: str, engine: EngineProcess, engine_bus: str
) -> None:
    """The adapter is on neither of them. Before the cut, all is as on one rank."""
    address = f"{cluster.head.address}:{RAY_PORT}"
    with cluster.engine(cluster.outside, address, *LAYOUTS[layout]) as log:
        for host in (cluster.head, cluster.other):
            assert len(named(host, "ray::TracewireRayWorker")) == 1
        assert not named(cluster.outside, "ray::TracewireRayWorker")
        async with tracewire.connect(cluster.switch.url) as client, tracewire.connect(engine_bus) as one_rank:
            model = await client.models.get("demo", timeout=30)
            theirs = await one_rank.models.get("demo", timeout=30)
            for name, scenario in SCENARIOS.items():
                ours = await scenario(client, model)
                # Where rounding decides between tokens, that it came to its end is all.
                if layout == "pipeline" or name not in TIES:
                    assert not same(await scenario(one_rank, theirs), ours, tolerance=TOLERANCES[layout]), name
            # A large variable reaches workers that cannot see the adapter's files.
            block = scaled_by(amounts=np.linspace(1.0, 1.25, 3_000_000, dtype=np.float32))
            ours, known = await outcome(client, model, block), await outcome(one_rank, theirs, block)
            assert ours["status"] == "finished"
            assert not same(known, ours, tolerance=TOLERANCES[layout])

            await cut_off(cluster, client, model, cluster.other)
        # The one that is cut off has nobody to tell it, and the other is told; nobody holds a device any more.
        for host in (cluster.head, cluster.other):
            await until_none(host, "ray::TracewireRayWorker", PATIENCE_S + 15)
        await until_none(cluster.outside, "tracewire", 30)
        await until_none(cluster.outside, "raylet", 30)
        # Which of the ranks is there is Ray's choice.
        assert re.search(f"no heartbeat came for {PATIENCE_S} s from rank [01] on host-b", log.read_text())
        assert f"its adapter has not answered for {PATIENCE_S} s" in last_words(cluster.other)


@pytest.mark.timeout(900)
async def test_the_adapters_host_is_cut_off(cluster: EngineCluster) -> None:
    """Its workers end by themselves, and somebody else has the trace when the lease of the engine has run out."""
    address = f"{cluster.head.address}:{RAY_PORT}"
    with cluster.engine(cluster.outside, address, *LAYOUTS["tensor parallel"]):
        async with tracewire.connect(cluster.switch.url) as client:
            model = await client.models.get("demo", timeout=30)
            await cut_off(cluster, client, model, cluster.outside)
        for host in (cluster.head, cluster.other):
            await until_none(host, "ray::TracewireRayWorker", PATIENCE_S + 30)
            assert "this worker ends: " in last_words(host)


@pytest.mark.timeout(900)
async def test_a_cluster_that_runs_here_outlives_the_engine(cluster: EngineCluster) -> None:
    """It is joined and left, on SIGTERM and after SIGKILL, and then serves another engine."""
    for kill in (psutil.Process.terminate, psutil.Process.kill):
        with cluster.engine(cluster.head, "auto", *LAYOUTS["tensor parallel"]):
            async with tracewire.connect(cluster.switch.url) as client:
                model = await client.models.get("demo", timeout=30)
                assert (await outcome(client, model, blocks.arithmetic))["status"] == "finished"
            for one in engine_processes(cluster.head):
                kill(one)
            for host in (cluster.head, cluster.other):
                await until_none(host, "ray::TracewireRayWorker", 30)
                assert named(host, "raylet")
            await until_none(cluster.head, "tracewire_engine", 30)


class Spaces:
    """The example's compose file, its services as hosts."""

    def __init__(self, laid: Switch, folder: Path) -> None:
        self.url, self.folder = laid.url, folder
        self.services = yaml.safe_load((ROOT / "examples/two_hosts/compose.yaml").read_text())["services"]
        self.hosts = {name: laid.host(name) for name in ("head", "other", "engine")}
        laid.introduce()
        for name in self.hosts:
            self.up(name)

    def log(self, name: str) -> Path:
        """Where a service prints to."""
        return self.folder / f"{name}.log"

    def up(self, name: str) -> None:
        """Start a service, with the address that its container would have found for itself."""
        service = self.services[name]
        values = {"RAY_AUTH_TOKEN": TOKEN["RAY_AUTH_TOKEN"], "CORES": "0|1"}
        environment = {
            variable: re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], str(value))
            for variable, value in service["environment"].items()
        }
        command = [*service["entrypoint"], *service["command"]]
        command[0] = str(BIN / command[0])
        if command[1] == "start":
            command.append(f"--node-ip-address={self.hosts[name].address}")
        self.hosts[name].start(command, self.log(name), environment)
        with self.log(name).open() as log:
            until = time.monotonic() + 90
            while command[1] == "start" and "Ray runtime started" not in log.read():
                assert time.monotonic() < until, self.log(name).read_text()
                time.sleep(0.2)

    def cut(self) -> None:
        """Cut the second host off."""
        self.hosts["other"].cut()

    def mend(self) -> None:
        """Connect it again, and restart its service."""
        self.hosts["other"].mend()
        for process in self.hosts["other"].processes():
            process.kill()
        self.up("other")


@pytest.mark.timeout(1200)
async def test_the_example_of_two_hosts(tmp_path: Path) -> None:
    """Its compose file's commands, and its own steps: an engine that comes back when its second host does."""
    with switch(tmp_path) as laid:
        spaces = Spaces(laid, tmp_path)
        came_to = await walk(spaces)
        assert came_to == {"restarts": 1, "same tokens": True, "status": "finished", "tokens": TOKENS}
