"""`deploy/` as it is used: its images are built, its compose file starts them, and its units run on a host of systemd.

The base images are Debian's, since a registry of images may be out of reach. Everything else is what `deploy/` has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tracewire
from tests.support import ROOT
from tests.support.containers import MISSING, Containers
from tracewire import BusRefused, Probe

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600), pytest.mark.usefixtures("starts_engine")]
if MISSING:
    pytestmark.append(pytest.mark.skip(reason=f"not installed: {', '.join(MISSING)}"))

SECRETS = ROOT / "deploy" / "secrets"
ONE_MACHINE = "deploy/one_machine.sh"
#: A host of systemd: the image of an engine with an init, and the environment at the path that the units name.
HOST = """
FROM localhost/tracewire-engine-cpu
USER root
RUN apt-get update && apt-get install -y --no-install-recommends curl openssl redis-server systemd systemd-sysv
RUN systemctl disable redis-server && rm -f /usr/local/bin/redis-*
RUN mkdir /opt/tracewire && ln -s /usr/local /opt/tracewire/venv
COPY deploy /deploy
ENTRYPOINT ["/sbin/init"]
"""
#: Asks the gateway on that host for a completion.
ASK = (
    'curl -sS --fail http://127.0.0.1:8080/v1/completions -H "Authorization: Bearer $(cat /etc/tracewire/gateway-key)"'
    """ -H 'Content-Type: application/json' -d '{"model": "demo", "prompt": "def", "max_tokens": 4}'"""
)
UNITS = ("tracewire-redis", "tracewire-gateway", "tracewire-engine@demo")


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    """Podman, with all images built."""
    made = Containers(tmp_path_factory.mktemp("containers"))
    made.run("deploy/debian/images.sh", *made.build, timeout_s=600)
    made.run(ONE_MACHINE, "build", *made.build, timeout_s=3000)
    return made


@pytest.fixture
def one_machine(containers: Containers) -> Iterator[Containers]:
    """What the compose file starts, ready."""
    assert not SECRETS.exists(), f"this test makes {SECRETS} and removes it"
    try:
        containers.run(ONE_MACHINE, "up", timeout_s=700)
        yield containers
    finally:
        containers.run(ONE_MACHINE, "down")
        containers.run("podman", "volume", "rm", "--force", "tracewire_redis")
        containers.run("rm", "-r", str(SECRETS))


def url(user: str) -> str:
    """The published Redis, for one of its users."""
    password, authority = (SECRETS / user).read_text().strip(), SECRETS / "tls" / "ca.crt"
    return f"rediss://tracewire-{user}:{password}@127.0.0.1:6379?ssl_ca_certs={authority}"


async def test_one_machine_serves_traces_to_clients_outside(one_machine: Containers) -> None:
    answer = json.loads(one_machine.run(ONE_MACHINE, "trace"))
    assert len(answer["choices"][0]["tracewire"]["saves"]["norm"]) == 8
    # The engine's trace is on Redis, where each role may do what the shipped rules say and no more.
    async with tracewire.connect(url("consumer")) as consumer:
        final = await consumer.subscribe(answer["tracewire"]["trace_id"]).result()
        assert final.text == answer["choices"][0]["text"]
        with pytest.raises(BusRefused):
            await consumer.trace("demo", "x", max_tokens=1).result()
    async with tracewire.connect(url("controller")) as controller:
        probe = Probe("hs", "residual(4)")
        result = await controller.trace("demo", "def", interventions=[probe], max_tokens=4).result()
        assert result.to_numpy("hs").shape == (4, 256)
    assert one_machine.run("podman", "exec", "tracewire_engine_1", "id", "-u").strip() == "10001"
    for service in ("redis", "engine", "gateway"):
        one_machine.run("podman", "healthcheck", "run", f"tracewire_{service}_1")
    # Engines are drained by their signal, within what the compose file gives them.
    assert one_machine.run("podman", "stop", "--time", "60", "tracewire_engine_1")
    exited = one_machine.run("podman", "inspect", "--format", "{{.State.ExitCode}}", "tracewire_engine_1")
    assert exited.strip() == "0"


@pytest.fixture
def host(containers: Containers, tmp_path: Path) -> Iterator[Containers]:
    """A running host of systemd, the container `tracewire-host`."""
    (tmp_path / "Dockerfile").write_text(HOST)
    image = ("-f", str(tmp_path / "Dockerfile"), "-t", "localhost/tracewire-host", ".")
    containers.run("podman", "build", *containers.build, *image, timeout_s=900)
    options = ("--name", "tracewire-host", "--systemd=always", "--cap-add", "SYS_ADMIN", "--shm-size", "1g")
    containers.run("podman", "run", "--detach", *options, "localhost/tracewire-host")
    try:
        yield containers
    finally:
        containers.run("podman", "rm", "--force", "tracewire-host")


def test_the_units_run_on_a_host_of_systemd(host: Containers) -> None:
    def inside(*command: str, timeout_s: float = 120) -> str:
        return host.run("podman", "exec", "tracewire-host", *command, timeout_s=timeout_s)

    inside("/deploy/systemd/install.sh")
    # It prints what it does not like, and ends with 0.
    assert inside("sh", "-c", "systemd-analyze verify /etc/systemd/system/tracewire-*.service 2>&1") == ""
    inside("systemctl", "enable", "--now", *UNITS)
    answer = json.loads(inside("timeout", "600", "sh", "-c", f"until {ASK}; do sleep 1; done", timeout_s=660))
    assert answer["usage"]["completion_tokens"] == 4
    # A second installation keeps what there is.
    before = inside("sh", "-c", "cat /etc/tracewire/*.env /etc/tracewire/secrets/*")
    inside("/deploy/systemd/install.sh")
    assert inside("sh", "-c", "cat /etc/tracewire/*.env /etc/tracewire/secrets/*") == before
    # Nobody but root and its service reads a password.
    assert inside("stat", "-c", "%a %G", "/etc/tracewire/secrets/engine").split() == ["640", "tracewire-redis"]
    # SIGTERM drains the engine, which counts as a good end.
    inside("systemctl", "stop", UNITS[2])
    shown = inside("systemctl", "show", "--property=Result,ExecMainStatus", UNITS[2])
    assert shown.split() == ["Result=success", "ExecMainStatus=0"]
