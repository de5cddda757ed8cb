"""Finding a Ray cluster: what is chosen, and what is said where there is none."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.adapter_command import adapter_command
from tracewire_engine.launch import ray_cluster
from tracewire_engine.launch.ray_cluster import ClusterError, ClusterUnavailable, joined, parse_address
from tracewire_engine.protocol.cluster import Cluster


@pytest.mark.parametrize(
    ("address", "parsed"),
    [("head:6379", ("head", 6379)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[fd00::1]:6379", ("fd00::1", 6379))],
)
def test_addresses(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed


@pytest.mark.parametrize(
    "address", ["head", "head:", ":6379", "head:x", "head:0", "head:70000", "", "ray://head:10001"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ClusterError, match=r"Ray address .* (is not valid|is not supported)"):
        parse_address(address)


def test_a_cluster_of_its_own_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ask", lambda *question: pytest.fail(f"asked {question}"))
    with joined("local", 2, "CPU") as cluster:
        assert cluster == Cluster("local")
        assert cluster.own


def test_without_an_address_it_is_the_one_that_runs_here_or_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ask", lambda *question: {"address": None})
    with joined(None, 2, "CPU") as cluster:
        assert cluster.own
    with pytest.raises(ClusterUnavailable, match="no Ray cluster runs on this machine"), joined("auto", 2, "CPU"):
        pytest.fail("it ran")


@contextmanager
def listener() -> Iterator[socket.socket]:
    """Something on a port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield server
        server.shutdown(socket.SHUT_RDWR)
        for one in held:
            one.close()


def test_nobody_answers() -> None:
    """Ray itself would try again for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with pytest.raises(ClusterUnavailable, match=f"no Ray cluster answers at {address}"), joined(address, 2, "CPU"):
        pytest.fail("it ran")


def test_what_answers_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_ASK_S", 5.0)
    with (
        listener() as server,
        pytest.raises(ClusterUnavailable, match="Ray cluster"),
        joined(f"127.0.0.1:{server.getsockname()[1]}", 2, "CPU"),
    ):
        pytest.fail("it ran")


def test_one_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would wait for half an hour."""
    answers = {
        "nodes": {"nodes": ["127.0.0.1", "10.0.0.2"]},
        "describe": {
            "total": {"CPU": 3.0},
            "nodes": [
                {"address": "127.0.0.1", "resources": {"CPU": 2.0}},
                {"address": "10.0.0.2", "resources": {"CPU": 1.0}},
            ],
        },
    }
    monkeypatch.setattr(ray_cluster, "_ask", lambda question, *_: answers[question])
    monkeypatch.setattr(ray_cluster, "_runs_here", lambda node: node == "127.0.0.1")
    with listener() as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with joined(address, 3, "CPU") as cluster:
            assert cluster == Cluster(address, "127.0.0.1")
            assert not cluster.own
        said = r"has 3 CPU, and this engine needs 4 \(its nodes: 10.0.0.2 1, 127.0.0.1 2\)"
        with pytest.raises(ClusterUnavailable, match=said), joined(address, 4, "CPU"):
            pytest.fail("it ran")


def test_a_cluster_that_asks_for_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By an address, Ray shows the token that lies ready only if it is told to."""
    asked: list[str | None] = []

    def ask(question: str, *_: str) -> object:
        asked.append(os.environ.get("RAY_AUTH_MODE"))
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise ClusterUnavailable("the Ray cluster could not be joined: AuthenticationError: InvalidAuthToken")
        return {"nodes": ["127.0.0.1"]} if question == "nodes" else {"total": {"CPU": 2.0}, "nodes": []}

    monkeypatch.setattr(ray_cluster, "_ask", ask)
    monkeypatch.setattr(ray_cluster, "_runs_here", lambda node: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with listener() as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match="RAY_AUTH_TOKEN"), joined(address, 2, "CPU"):
            pytest.fail("it ran")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        # Put back with the rest.
        monkeypatch.setenv("RAY_AUTH_MODE", "")
        with joined(address, 2, "CPU") as cluster:
            assert cluster.address == address
    assert asked == [None, "", "token", "token"]


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match="needs Ray: pip install"), joined(None, 2, "CPU"):
        pytest.fail("it ran")


def test_the_command_says_it_and_loads_nothing(tmp_path: Path, embedded: str) -> None:
    """With exit status 2 the supervisor does not try again, with 1 it does."""
    for address, status, said in (
        ("ray://head:10001", 2, "Ray's client protocol cannot run an engine"),
        ("127.0.0.1:1", 1, "no Ray cluster answers at 127.0.0.1:1"),
    ):
        options = ["--distributed-executor-backend", "ray", "--ray-address", address]
        done = adapter_command(tmp_path, "demo", "--url", embedded, *options)
        assert done.returncode == status
        assert said in done.stderr
