"""Finds and checks the Ray cluster for an engine's workers, before the engine is built.

There are three choices. `local` starts a cluster for this engine, which ends with it. `auto` uses the cluster that
`ray start` started on this machine. `HOST:PORT` uses a cluster whose head is at that address. An engine needs a Ray
node on its own machine. If there is none, this machine joins the cluster as a node without resources while the engine
lives.

If a cluster does not answer or is too small, Ray and vLLM wait silently, in some cases for ever. So this module first
asks the cluster from a separate process with time limits, and reports problems in an error message.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tracewire_engine.link.addresses import host_and_port
from tracewire_engine.protocol.cluster import Cluster

from .parent_death import die_with_parent

__all__ = ["ClusterError", "ClusterUnavailable", "joined", "parse_address"]

#: Time limits, in seconds: to connect to a cluster's head, to ask the cluster for its resources, and to join it.
_CONNECT_S, _ASK_S, _JOIN_S = 5.0, 30.0, 60.0


class ClusterError(RuntimeError):
    """This engine has no Ray cluster to run in. The message names the setting and what to do."""


class ClusterUnavailable(ClusterError):
    """The cluster does not answer or is too small at present; a later try may succeed."""


def parse_address(address: str) -> tuple[str, int]:
    """The host and the port of a cluster's head.

    Raises:
        ClusterError: `address` is not of the form `HOST:PORT`.
    """
    if "://" in address:
        raise ClusterError(
            f"the Ray address {address!r} is not supported: Ray's client protocol cannot run an engine; "
            "give the HOST:PORT that `ray start --head` printed, 'auto' or 'local'"
        )
    try:
        host, port = host_and_port(address)
    except ValueError:
        host, port = "", 0
    if not port:
        raise ClusterError(
            f"the Ray address {address!r} is not valid: give HOST:PORT of the cluster's head, 'auto' for the cluster "
            "that runs on this machine, or 'local' to start one for this engine"
        )
    return host, port


@contextmanager
def joined(address: str | None, devices: int, kind: str) -> Iterator[Cluster]:
    """Find the cluster to run in, and make this machine a node of it while the context lasts.

    Args:
        address: `"local"`, `"auto"` or `HOST:PORT`; `None` for the cluster on this machine if one runs, else a local
            one.
        devices: how many devices the engine needs.
        kind: Ray's name of the devices, `"CPU"` or `"GPU"`.

    Raises:
        ClusterError: `address` is not valid, or Ray is not installed.
        ClusterUnavailable: no cluster runs, it does not answer, or it is too small.
    """
    if find_spec("ray") is None:
        raise ClusterError("--distributed-executor-backend ray needs Ray: pip install 'tracewire[ray]'")
    if address == "local":
        yield Cluster("local")
        return
    if address is None or address == "auto":
        found = _ask("find")["address"]
        if found is None and address is None:
            yield Cluster("local")
            return
        if found is None:
            raise ClusterUnavailable(
                "no Ray cluster runs on this machine (--ray-address auto): start one with `ray start --head`, "
                "or give the HOST:PORT of a cluster's head, or 'local' to start one for this engine"
            )
        address = str(found)
    host, port = parse_address(address)
    here = _reach(host, port)
    with _node(address, here) as node:
        said = _ask("describe", address, node)
        has = said["total"].get(kind, 0)
        if has < devices:
            nodes = ", ".join(sorted(f"{one['address']} {one['resources'].get(kind, 0):g}" for one in said["nodes"]))
            raise ClusterUnavailable(
                f"the Ray cluster at {address} has {has:g} {kind}, and this engine needs {devices} "
                f"(its nodes: {nodes}); add nodes with `ray start --address={address}`, or take fewer with "
                "--tensor-parallel-size and --pipeline-parallel-size"
            )
        yield Cluster(address, node)


def _reach(host: str, port: int) -> str:
    """The address of this machine from which it connects to a cluster's head.

    Raises:
        ClusterUnavailable: the connection fails.
    """
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {host}:{port} ({error}): is it running, and may this machine connect to it?"
        ) from error


def _ask(*question: str) -> Any:
    """Ask Ray a question in a separate process, since Ray may hang or crash.

    Raises:
        ClusterUnavailable: there is no answer in time, or the answer is an error.
    """
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "tracewire_engine.launch.ray_cluster", *question]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_ASK_S)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        raise ClusterUnavailable(f"the Ray cluster did not answer within {_ASK_S:g} s{_last_words(said)}") from error
    answer = done.stdout.rpartition("\n{")[2] if "\n{" in done.stdout else done.stdout.removeprefix("{")
    if done.returncode or not answer:
        raise ClusterUnavailable(f"the Ray cluster could not be asked{_last_words(done.stderr)}")
    answered = json.loads("{" + answer)
    if "error" in answered:
        raise ClusterUnavailable(f"the Ray cluster could not be joined: {answered['error']}")
    return answered


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {lines[-1]}" if lines else ""


@contextmanager
def _node(address: str, here: str) -> Iterator[str]:
    """This machine's address in the cluster. If it is no node yet, it joins as one without resources.

    Raises:
        ClusterError: the cluster requires a token that is not set.
        ClusterUnavailable: this machine could not join in time.
    """
    try:
        nodes = _ask("nodes", address)["nodes"]
    except ClusterError as error:
        if "AuthenticationError" not in str(error) or os.environ.get("RAY_AUTH_MODE"):
            raise
        if not _has_token():
            raise ClusterError(
                f"the Ray cluster at {address} requires a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the "
                "head's token (`ray get-auth-token` prints it there)"
            ) from error
        # Ray sends its token by itself to a cluster that it found on this machine, but not to one given by address.
        os.environ["RAY_AUTH_MODE"] = "token"
        nodes = _ask("nodes", address)["nodes"]
    ours = _addresses() | {here}
    # A node whose machine died stays in Ray's list for a while.
    found = next((node for node in nodes if node in ours and _runs_here(node)), None)
    if found is not None:
        yield found
        return
    started = _start_node(address, here)
    try:
        until = time.monotonic() + _JOIN_S
        while here not in _ask("nodes", address)["nodes"] or not _runs_here(here):
            if started.poll() is not None or time.monotonic() > until:
                raise ClusterUnavailable(
                    f"this machine ({here}) could not join the Ray cluster at {address}: `ray start` "
                    + (f"ended with {started.returncode}" if started.poll() is not None else "has not finished")
                )
            time.sleep(0.5)
        yield here
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(10)
        started.kill()
        started.wait()


def _has_token() -> bool:
    """Whether Ray finds a token in the environment or in its file."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def _start_node(address: str, here: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tracewire_engine.launch.ray_cluster", "node", str(os.getpid()), address, here]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACEWIRE_")}
    # The output of Ray must not mix with the adapter's.
    return subprocess.Popen(command, env=environment, stdout=sys.stderr, process_group=0)


def _raylets() -> list[list[str]]:
    """The command lines of the Ray nodes on this machine, found in the way that Ray finds them."""
    import psutil

    found = psutil.process_iter(["name", "cmdline"])
    return [process.info["cmdline"] or [] for process in found if process.info["name"] == "raylet"]


def _runs_here(node: str) -> bool:
    """Whether the Ray node with this address runs on this machine."""
    return any(f"--node_ip_address={node}" in command for command in _raylets())


def _addresses() -> set[str]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {one.address for card in psutil.net_if_addrs().values() for one in card if one.family in families}


# --- in processes of their own ----------------------------------------------------------------------------------------


def _find() -> Mapping[str, Any]:
    from ray._private.services import canonicalize_bootstrap_address

    # Without a running node, Ray would return the last cluster that this machine was a node of.
    if not _raylets():
        return {"address": None}
    try:
        return {"address": canonicalize_bootstrap_address("auto")}
    except ConnectionError:
        return {"address": None}


def _nodes(address: str) -> Mapping[str, Any]:
    from ray._raylet import GcsClient  # type: ignore[attr-defined, unused-ignore]

    nodes = GcsClient(address=address).get_all_node_info(timeout=_CONNECT_S).values()
    return {"nodes": [node.node_manager_address for node in nodes if node.state == 0]}


def _describe(address: str, node: str) -> Mapping[str, Any]:
    import ray

    ray.init(address=address, _node_ip_address=node, log_to_driver=False, configure_logging=False)
    nodes = [
        {"address": one["NodeManagerAddress"], "resources": one["Resources"]} for one in ray.nodes() if one["Alive"]
    ]
    return {"total": ray.cluster_resources(), "nodes": nodes}


def _main(question: str, *arguments: str) -> None:
    if question == "node":
        parent, address, here = arguments
        # Ray's processes end with `ray start --block`, and so with the adapter.
        die_with_parent(int(parent))
        ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
        options = ["--num-cpus=0", "--num-gpus=0", f"--node-ip-address={here}", "--disable-usage-stats", "--block"]
        os.execvp(ray, ["ray", "start", f"--address={address}", *options])
    answer = {"find": _find, "nodes": _nodes, "describe": _describe}[question]
    try:
        said = answer(*arguments)  # type: ignore[operator]
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    print("\n" + json.dumps(said), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
