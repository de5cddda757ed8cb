"""Hosts that are a Ray cluster, without an engine: how one is found and joined, and how ranks on two of them talk.

The hosts are network namespaces (`hosts.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.parallel.hosts import RAY_PORT, Cluster, Host, named, switch

pytestmark = pytest.mark.full


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts with room for a rank each, and a third one."""
    with switch(tmp_path) as laid:
        yield Cluster(laid, tmp_path)


def asked(host: Host, address: str, devices: int) -> subprocess.CompletedProcess[str]:
    """What an engine on this host would be told of a cluster: its address and ours, or what is wrong."""
    code = f"""
from tracewire_engine.launch.ray_cluster import ClusterError, joined
try:
    with joined({address!r}, {devices}, "CPU") as cluster:
        print(cluster.address, cluster.node)
except ClusterError as error:
    print(type(error).__name__, error)
"""
    command = host.inside([sys.executable, "-c", code])
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=host.environment)


@pytest.mark.timeout(900)
def test_three_ways_to_a_cluster(cluster: Cluster) -> None:
    """From a node of it and from a host that is none, which is one only while it must."""
    address = f"{cluster.head.address}:{RAY_PORT}"
    for host, given in (
        *[(host, address) for host in (cluster.head, cluster.other, cluster.outside)],
        (cluster.other, "auto"),
    ):
        done = asked(host, given, 2)
        assert done.stdout == f"{address} {host.address}\n", done
    assert not named(cluster.outside, "raylet")
    assert "ClusterUnavailable no Ray cluster runs on this machine" in asked(cluster.outside, "auto", 2).stdout
    said = asked(cluster.outside, address, 3).stdout
    assert "has 2 CPU, and this engine needs 3 (its nodes: 10.77.0.1 1, 10.77.0.2 1, 10.77.0.3 0)" in said
    assert not named(cluster.outside, "raylet")


@pytest.mark.parametrize("nodes", [("one", "one"), ("one", "other")])
def test_ranks_share_memory_on_one_host_only(tmp_path: Path, nodes: tuple[str, str]) -> None:
    """vLLM's ranks on a CPU would look for each other's memory on two hosts as well, and not find it."""
    with switch(tmp_path) as laid:
        hosts = [laid.host("host-a"), laid.host("host-b")]
        if nodes[0] == nodes[1]:
            hosts[1] = hosts[0]
        store = f"tcp://{hosts[0].address}:29777"
        ranks = [
            host.start(
                [sys.executable, "-m", "tests.support.parallel.far_ranks", str(rank), store, host.address, node],
                tmp_path / f"{rank}.log",
                # A namespace's commands run in its root.
                {"PYTHONPATH": str(ROOT)},
            )
            for rank, (host, node) in enumerate(zip(hosts, nodes, strict=True))
        ]
        for rank in ranks:
            rank.wait(120)
        way = "memory" if nodes[0] == nodes[1] else "gloo"
        for rank in range(2):
            assert f"said {way} [3.0, 3.0] [[0.0, 0.0], [1.0, 1.0]]" in (tmp_path / f"{rank}.log").read_text()
