"""The gateway of `deploy/`: its manifests are ones that Kubernetes and Compose take, and its command serves its probes.

No container runs here: the manifests' own command runs as a process, on a Redis with the users that `deploy/` has.
"""

# ruff: noqa: ASYNC221
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from tests.e2e.parallel.test_deployment import COMPOSE, DEPLOY, RESOURCES, Place, container, place, pod
from tests.faults.harness.processes import free_port
from tests.support import ROOT
from tests.support.until import until
from tracewire.gateway.keys import RIGHTS, entry_of

GATEWAY = container("Deployment", "tracewire-gateway")
VERSIONS = ("1.25", "1.30", "1.37")
KEY = "tw-key"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("kind", "name"), RESOURCES)
def test_kubernetes_takes_the_manifests(kind: str, name: str, version: str) -> None:
    kubernetes_validate.validate(RESOURCES[kind, name], version, strict=True)


def test_kubernetes_refuses_what_it_does_not_know() -> None:
    wrong = {**RESOURCES["Service", "tracewire-gateway"], "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_them() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(DEPLOY)], check=True, capture_output=True, timeout=60).stdout
    found = {(one["kind"], one["metadata"]["name"].partition("-redis-")[0]): one for one in yaml.safe_load_all(built)}
    assert found.keys() >= RESOURCES.keys()
    spaces = {one["metadata"].get("namespace") for (kind, _), one in found.items() if kind != "Namespace"}
    assert spaces == {"tracewire"}


@pytest.mark.parametrize("file", ["deploy/compose.yaml", "examples/two_hosts/compose.yaml"])
def test_compose_takes_its_file(file: str) -> None:
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, ROOT / file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def option(command: list[str], name: str) -> str:
    """The value of an option."""
    return command[command.index(name) + 1]


def test_a_gateway_has_the_time_to_drain_and_its_ports_agree() -> None:
    spec, service = pod("Deployment", "tracewire-gateway")["spec"], RESOURCES["Service", "tracewire-gateway"]["spec"]
    compose = COMPOSE["services"]["gateway"]
    before = float(GATEWAY["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before + float(option(GATEWAY["args"], "--drain")) < spec["terminationGracePeriodSeconds"]
    assert float(option(compose["command"], "--drain")) < float(compose["stop_grace_period"].removesuffix("s"))
    (port,) = GATEWAY["ports"]
    assert port["containerPort"] == int(option(GATEWAY["args"], "--port")) == service["ports"][0]["port"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert RESOURCES["NetworkPolicy", "tracewire-gateway"]["spec"]["ingress"][0]["ports"] == [{"port": port["name"]}]
    # Redis lets in what has this label.
    admitted = RESOURCES["NetworkPolicy", "tracewire-redis"]["spec"]["ingress"][0]["from"]
    labels = pod("Deployment", "tracewire-gateway")["metadata"]["labels"]
    assert any(one["podSelector"]["matchLabels"].items() <= labels.items() for one in admitted)
    (mount,) = (one for one in GATEWAY["volumeMounts"] if one["name"] != "authority")
    (volume,) = (one for one in spec["volumes"] if one["name"] != "authority")
    assert option(GATEWAY["args"], "--keys").startswith(mount["mountPath"] + "/")
    assert mount["name"] == volume["name"]
    (secret,) = (one for one in compose["secrets"] if one != "ca.crt")
    assert option(compose["command"], "--keys") == f"/run/secrets/{secret}"
    assert secret in COMPOSE["secrets"]


@contextmanager
def gateway(one: Place, command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The manifests' command on a port of this machine, and where it serves."""
    (one.folder / "keys.toml").write_text(entry_of(KEY, "alice", RIGHTS, ""))
    port = free_port()
    replaced = {"--host": "127.0.0.1", "--port": str(port), "--keys": str(one.folder / "keys.toml")}
    whole = [replaced.get(before, part) for before, part in zip(["", *command], command, strict=False)]
    environment = {**os.environ, "TRACEWIRE_URL": one.url("controller")}
    started = [sys.executable, "-m", "tracewire.cli", *whole]
    running = subprocess.Popen(started, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == f"ready http://127.0.0.1:{port}\n"
        yield running, f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait()


def url_of(environment: Any) -> str:
    """The URL of Redis without its password and host."""
    return str(environment).partition(":")[0] + "/" + str(environment).partition("//")[2].partition(":")[0]


COMMANDS = {"pod": GATEWAY["args"], "compose": COMPOSE["services"]["gateway"]["command"]}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
async def test_the_command_serves_its_probes(tmp_path: Path, command: list[str]) -> None:
    (url,) = [one["value"] for one in GATEWAY["env"] if one["name"] == "TRACEWIRE_URL"]
    assert url_of(url) == url_of(COMPOSE["services"]["gateway"]["environment"]["TRACEWIRE_URL"])
    probes = {name: GATEWAY[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    check = COMPOSE["services"]["gateway"]["healthcheck"]["test"]
    async with place(tmp_path) as one:
        with gateway(one, command) as (running, url):
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:

                async def status(path: str) -> int:
                    return (await http.get(path)).status_code

                asked = [sys.executable, *(part.replace("http://127.0.0.1:8080", url) for part in check[2:])]
                assert {name: await status(path) for name, path in probes.items()} == dict.fromkeys(probes, 200)
                assert subprocess.run(asked, timeout=60, capture_output=True, check=False).returncode == 0
                assert await status("/traces") == 401
                found = (await http.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})).text
                # Its user may ask for Redis's memory.
                assert "tracewire_redis_limit_bytes 3.22" in found
                one.stop()

                async def unready() -> bool:
                    return await status(probes["readinessProbe"]) == 503

                await until(unready)
                assert await status(probes["livenessProbe"]) == 200
                assert subprocess.run(asked, timeout=60, capture_output=True, check=False).returncode == 1
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
