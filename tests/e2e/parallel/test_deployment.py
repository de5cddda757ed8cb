"""What `deploy/` says is carried out: each command of the manifests as a process, on a Redis that their script starts.

No container runs here. `redis-server` is the one that the tests have, `tracewire` this package's command, and a
scripted engine stands where `tracewire engine` does, but in the test that starts a real one.
"""

# ruff: noqa: ASYNC110, ASYNC220
from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import yaml
from cryptography import x509

import tracewire
from tests.faults.harness.processes import free_port
from tests.support import ROOT
from tests.support.redis.servers import BINARIES
from tests.support.scripted_engine import acts
from tracewire_bus.bus import Bus
from tracewire_bus.transport import embedded
from tracewire_bus.transport.errors import BusError

DEPLOY = ROOT / "deploy"
USERS = ("engine", "controller", "guard", "editor", "consumer", "operator", "admin")
PATIENCE = 60


def load(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


COMPOSE = load(DEPLOY / "compose.yaml")[0]
KUSTOMIZATION = load(DEPLOY / "kustomization.yaml")[0]
RESOURCES = {
    (one["kind"], one["metadata"]["name"]): one for path in KUSTOMIZATION["resources"] for one in load(DEPLOY / path)
}


def pod(kind: str, name: str) -> dict[str, Any]:
    """A workload's pod, with its metadata."""
    template: dict[str, Any] = RESOURCES[kind, name]["spec"]["template"]
    return template


def container(kind: str, name: str) -> dict[str, Any]:
    """Its one container."""
    (one,) = pod(kind, name)["spec"]["containers"]
    return dict(one)


ENGINE = container("Deployment", "tracewire-engine")
REDIS = container("StatefulSet", "tracewire-redis")


# --- what must agree --------------------------------------------------------------------------------------------------


def test_everything_that_is_referred_to_is_there() -> None:
    files = {path.relative_to(DEPLOY).as_posix() for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert set(KUSTOMIZATION["resources"]) == files
    (made,) = KUSTOMIZATION["configMapGenerator"]
    assert all((DEPLOY / file).is_file() for file in made["files"])
    labels = {
        name: pod(kind, name)["metadata"]["labels"] for kind, name in RESOURCES if kind in ("Deployment", "StatefulSet")
    }
    for (kind, name), one in RESOURCES.items():
        if kind == "Namespace":
            continue
        spec, chosen = one["spec"], labels[name]
        selector = spec.get("selector", spec.get("podSelector"))
        selected = selector if kind == "Service" else selector["matchLabels"]
        assert selected.items() <= chosen.items()
        assert not [other for other in labels if other != name and selected.items() <= labels[other].items()]
    policy = RESOURCES["NetworkPolicy", "tracewire-redis"]["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": labels["tracewire-engine"]}} in policy
    volumes = {one["name"]: one for one in pod("StatefulSet", "tracewire-redis")["spec"]["volumes"]}
    assert volumes["setup"]["configMap"]["name"] == made["name"]
    (password,) = (one for one in ENGINE["env"] if "valueFrom" in one)
    assert password["valueFrom"]["secretKeyRef"] == {
        "name": volumes["secrets"]["projected"]["sources"][0]["secret"]["name"],
        "key": "engine",
    }
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {one["build"]["target"] for one in COMPOSE["services"].values() if "build" in one} <= set(stages)
    for sources, _ in copied():
        assert all((ROOT / name).exists() for name in sources), sources


def copied() -> Iterator[tuple[list[str], str]]:
    """What the Dockerfile copies from the repository, and where to."""
    for line in re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        *sources, target = line.split()
        yield sources, target


def test_what_an_image_is_given_makes_a_whole_wheel(tmp_path: Path) -> None:
    """The first stage's last command, on the files that it copies and no others."""
    for sources, target in copied():
        if target.startswith("/"):
            continue
        for source in sources:
            where = tmp_path / target / Path(source).name if target == "./" else tmp_path / target
            where.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, where, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, where)
    build = ["pip", "wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    assert f"RUN {' '.join(build)}\n" in (DEPLOY / "Dockerfile").read_text()
    subprocess.run([sys.executable, "-m", *build], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {
        "tracewire/cli/main.py",
        "tracewire_bus/bus.py",
        "tracewire_engine/launch/cli.py",
        "tracewire_engine/demo_model/config.json",
    }


def test_both_start_redis_alike_and_it_never_evicts() -> None:
    compose = COMPOSE["services"]["redis"]["command"]
    assert compose[2:] == REDIS["args"]
    assert compose[:1] == REDIS["command"][:1]
    assert REDIS["args"][REDIS["args"].index("--maxmemory-policy") :][:2] == ["--maxmemory-policy", "noeviction"]


def test_an_engine_has_the_time_to_drain() -> None:
    drain = ENGINE["lifecycle"]["preStop"]["exec"]["command"]
    within = float(drain[drain.index("--timeout") + 1])
    after = float(ENGINE["args"][ENGINE["args"].index("--drain") + 1])
    assert within + after < pod("Deployment", "tracewire-engine")["spec"]["terminationGracePeriodSeconds"]
    compose = COMPOSE["services"]["engine"]
    assert float(compose["command"][compose["command"].index("--drain") + 1]) < float(compose["stop_grace_period"][:-1])


# --- what is run ------------------------------------------------------------------------------------------------------


class Place:
    """A Redis as the manifests start it, with a password for each user, and where the commands are run."""

    def __init__(self, folder: Path, arguments: list[str], binary: str = "") -> None:
        #: Whether it takes TLS only. The tests' own build of Redis has none.
        self.tls = bool(binary)
        self.folder = folder
        self.port = free_port()
        self.passwords = {user: f"{user}-secret" for user in USERS}
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments = [str(folder / "data") if part == "/data" else part for part in arguments]
        for name in ("secrets", "made", "data", "bin"):
            (folder / name).mkdir()
        for user, password in self.passwords.items():
            (folder / "secrets" / user).write_text(f"{password}\n")
        (folder / "bin" / "redis-server").symlink_to(binary or embedded._binary())

    def start(self) -> None:
        """Start it."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TRACEWIRE_ACL": str(DEPLOY / "redis" / "users-6.2.acl"),
            "TRACEWIRE_SECRETS": str(self.folder / "secrets"),
            "TRACEWIRE_RUN": str(self.folder / "made"),
            "TRACEWIRE_TLS": "yes" if self.tls else "no",
        }
        self.process = subprocess.Popen(
            [
                "sh",
                str(DEPLOY / "redis" / "start.sh"),
                *self._arguments,
                "--tls-port" if self.tls else "--port",
                str(self.port),
            ],
            stdout=subprocess.DEVNULL,
            env=environment,
            preexec_fn=embedded.die_with_parent(),
        )

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def url(self, user: str) -> str:
        """Its URL for a user."""
        name = "default" if user == "admin" else f"tracewire-{user}"
        at = f"://{name}:{self.passwords.get(user, '')}@127.0.0.1:{self.port}"
        return f"rediss{at}?ssl_ca_certs={self.folder / 'secrets' / 'ca.crt'}" if self.tls else f"redis{at}"

    def engines_url(self) -> str:
        """The URL that an engine is given, with its variables filled in."""
        (url,) = (one["value"] for one in ENGINE["env"] if one["name"] == "TRACEWIRE_URL")
        compose = COMPOSE["services"]["engine"]["environment"]["TRACEWIRE_URL"]
        authority = "?ssl_ca_certs="
        url, compose = url.partition(authority)[0], compose.partition(authority)[0]
        assert re.sub(r"\$\{[^}]*\}", "X", compose).replace("@redis", "@R") == (
            url.replace("$(TRACEWIRE_PASSWORD)", "X").replace("@tracewire-redis", "@R")
        )
        filled = url.replace("$(TRACEWIRE_PASSWORD)", self.passwords["engine"]).replace("rediss://", "redis://")
        return str(filled).replace("tracewire-redis:6379", f"127.0.0.1:{self.port}")

    async def run(self, command: list[str], user_url: str = "") -> subprocess.CompletedProcess[str]:
        """A command of the manifests, in the environment of an engine's container."""
        assert command[0] == "tracewire"
        environment = {**os.environ, "TRACEWIRE_URL": user_url or self.engines_url()}
        whole = [sys.executable, "-m", "tracewire.cli", *command[1:]]
        return await anyio.to_thread.run_sync(
            partial(subprocess.run, whole, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        )


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    """A Redis that answers."""
    one = Place(folder, REDIS["args"])
    one.start()
    try:
        await answers(one)
        yield one
    finally:
        one.stop()


async def answers(place: Place) -> None:
    """Wait until it does."""
    with anyio.fail_after(PATIENCE):
        while True:
            try:
                async with Bus.open(place.url("engine")):
                    return
            except BusError:
                await anyio.sleep(0.05)


def _certificates(folder: Path, *names: str) -> None:
    subprocess.run(["sh", str(DEPLOY / "redis" / "certificates.sh"), str(folder), *names], check=True, timeout=PATIENCE)


def test_a_certificate_is_made_once_for_the_names_that_the_urls_have(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    _certificates(folder, "tracewire-redis", "127.0.0.1", "::1")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert all(path.stat().st_mode & 0o77 == 0 for path in folder.iterdir())
    certificate = x509.load_pem_x509_certificate(before["tls.crt"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["tracewire-redis"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(before["ca.crt"]))
    _certificates(folder, "tracewire-redis")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # One that is gone is signed by the same authority.
    (folder / "tls.crt").unlink()
    _certificates(folder, "tracewire-redis")
    assert (folder / "ca.crt").read_bytes() == before["ca.crt"]
    made = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(before["ca.crt"]))
    assert made.serial_number != certificate.serial_number


def test_each_url_of_the_manifests_is_by_tls_and_its_authority_is_there() -> None:
    for name in ("engine", "gateway"):
        one = container("Deployment", f"tracewire-{name}")
        (url,) = (setting["value"] for setting in one["env"] if setting["name"] == "TRACEWIRE_URL")
        (mount,) = (mount for mount in one["volumeMounts"] if mount["name"] == "authority")
        (volume,) = (v for v in pod("Deployment", f"tracewire-{name}")["spec"]["volumes"] if v["name"] == "authority")
        assert url.startswith("rediss://")
        assert url.endswith(f"?ssl_ca_certs={mount['mountPath']}/ca.crt")
        # Redis's key stays away from clients.
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        service = COMPOSE["services"][name]
        url = service["environment"]["TRACEWIRE_URL"]
        assert url.startswith("rediss://")
        assert url.endswith("?ssl_ca_certs=/run/secrets/ca.crt")
        assert [one for one in service["secrets"] if "." in one] == ["ca.crt"]
    assert {"ca.crt", "tls.crt", "tls.key"} <= {*COMPOSE["services"]["redis"]["secrets"]}
    script = (DEPLOY / "systemd" / "install.sh").read_text()
    urls = re.findall(r"^TRACEWIRE_URL=(.*)$", script, re.MULTILINE)
    assert len(urls) == 2
    assert all(url.startswith("rediss://") and url.endswith("?ssl_ca_certs=$etc/ca.crt") for url in urls)


def test_redis_does_not_start_without_a_certificate(tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("secret")
    environment = {**os.environ, "TRACEWIRE_SECRETS": str(tmp_path), "TRACEWIRE_RUN": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(DEPLOY / "redis" / "start.sh")], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "tls.crt is missing: make it by certificates.sh" in done.stderr


@pytest.mark.parametrize("version", [one for one in BINARIES if int(one.partition(".")[0]) >= 7])
async def test_redis_takes_tls_only(version: str, tmp_path: Path) -> None:
    one = Place(tmp_path, REDIS["args"], BINARIES[version])
    _certificates(tmp_path / "secrets", "localhost", "127.0.0.1")
    one.start()
    try:
        await answers(one)
        async with Bus.open(one.url("engine")):
            pass
        plain = one.url("engine").partition("?")[0].replace("rediss://", "redis://")
        with pytest.raises(BusError):
            async with Bus.open(plain):
                pass
        # Without the authority, nobody takes it for the Redis that it says it is.
        with pytest.raises(BusError, match="CERTIFICATE_VERIFY_FAILED"):
            async with Bus.open(one.url("engine").partition("?")[0]):
                pass
    finally:
        one.stop()


def probes() -> Iterator[tuple[str, list[str]]]:
    """The commands by which an engine is probed."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield name, ENGINE[name]["exec"]["command"]
    kind, *command = COMPOSE["services"]["engine"]["healthcheck"]["test"]
    assert kind == "CMD"
    yield "healthcheck", command


async def test_redis_starts_with_the_users_and_only_they_get_in(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        for user in USERS:
            async with Bus.open(one.url(user)):
                pass
        for user in (*USERS, "nobody"):
            for password in ("", "wrong"):
                one.passwords[user] = password
                with pytest.raises(BusError):
                    async with Bus.open(one.url(user)):
                        pass
        # A probe by somebody without a password.
        check = REDIS["readinessProbe"]["exec"]["command"]
        assert check == REDIS["startupProbe"]["exec"]["command"]
        assert COMPOSE["services"]["redis"]["healthcheck"]["test"] == ["CMD-SHELL", check[-1]]
        with socket.create_connection(("127.0.0.1", one.port)) as connection:
            connection.sendall(b"PING\r\n")
            assert b"NOAUTH" in connection.recv(100)
        made = (tmp_path / "made" / "users.acl").read_text()
        assert "secret" not in made.replace("secrets", "")
        assert (tmp_path / "made" / "users.acl").stat().st_mode & 0o77 == 0


async def test_a_link_that_somebody_has_laid_is_not_followed(tmp_path: Path) -> None:
    """In a folder that others may write to, such as /tmp."""
    one = Place(tmp_path, REDIS["args"])
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "made" / "users.acl").symlink_to(victim)
    one.start()
    try:
        await answers(one)
    finally:
        one.stop()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "made" / "users.acl").is_symlink()


async def test_a_user_without_a_password_cannot_log_in(tmp_path: Path) -> None:
    one = Place(tmp_path, REDIS["args"])
    (tmp_path / "secrets" / "consumer").unlink()
    (tmp_path / "secrets" / "controller").write_text("\n")
    (tmp_path / "secrets" / "admin").unlink()
    one.start()
    try:
        await answers(one)
        for user in ("consumer", "controller", "admin"):
            for password in ("", f"{user}-secret"):
                one.passwords[user] = password
                with pytest.raises(BusError):
                    async with Bus.open(one.url(user)):
                        pass
    finally:
        one.stop()


def test_a_password_that_cannot_be_read_starts_no_redis(tmp_path: Path) -> None:
    one = Place(tmp_path, REDIS["args"])
    (tmp_path / "secrets" / "engine").unlink()
    (tmp_path / "secrets" / "engine").mkdir()
    one.start()
    assert one.process is not None
    assert one.process.wait(PATIENCE) != 0


async def test_probes_and_the_hook_do_what_they_are_there_for(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        for name, command in probes():
            said = await one.run(command)
            assert said.returncode == 1, (name, said)
            assert socket.gethostname() in said.stderr
        engine = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.scripted_engine",
                "--url",
                one.engines_url(),
                "--rate",
                "50",
                "--lease",
                "5",
            ],
            cwd=ROOT,
        )
        try:
            async with tracewire.connect(one.url("controller")) as client:
                await client.models.get("tiny", timeout=PATIENCE)
                trace = client.trace("tiny", "last", acts, max_tokens=100, detach=True)
                await trace.start()
                for name, command in probes():
                    said = await one.run(command)
                    assert said.returncode == 0, (name, said)
                    assert said.stdout.endswith("\tserving\n")
                # Nobody restarts an engine because Redis is away.
                one.stop()
                readiness, liveness = [command for _, command in probes()][1:3]
                assert (await one.run(readiness)).returncode == 1
                assert (await one.run(liveness)).returncode == 0
                one.start()
                await answers(one)
                assert (await one.run(readiness)).returncode == 0
                # As a pod ends; the SIGTERM that follows finds nobody.
                said = await one.run(ENGINE["lifecycle"]["preStop"]["exec"]["command"])
                assert said.returncode == 0, said
                assert said.stdout.endswith("has left\n")
                assert await anyio.to_thread.run_sync(engine.wait, PATIENCE) == 0
                result = await trace.result()
                assert len(result.token_ids) == 100
                await trace.aclose()
                assert (await one.run(readiness)).returncode == 1
        finally:
            engine.kill()
            engine.wait()


async def test_what_the_documentation_tells_operators_to_type(tmp_path: Path) -> None:
    """Each `tracewire` command of the page, as the user that it names, on this Redis."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    commands = [
        shlex.split(line.strip(), comments=True)
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.strip().startswith("tracewire ") and "engine " not in line.split("#")[0]
    ]
    assert {command[1] for command in commands} >= {"engines", "ready", "drain", "models"}
    async with place(tmp_path) as one:
        engine = subprocess.Popen(
            [sys.executable, "-m", "tests.support.scripted_engine", "--url", one.engines_url(), "--engine", "ENGINE"],
            cwd=ROOT,
        )
        try:
            async with tracewire.connect(one.url("controller")) as client:
                await client.models.get("tiny", timeout=PATIENCE)
                for command in sorted(commands, key=lambda command: command[1] == "drain"):
                    if command[1] == "drain" and not await client.engines.list():
                        continue
                    said = await one.run(command, one.url("operator"))
                    assert said.returncode == 0, (command, said)
        finally:
            engine.kill()
            engine.wait()


@pytest.mark.usefixtures("starts_engine")
@pytest.mark.full
async def test_a_real_engine_is_started_probed_and_drained_as_the_manifests_say(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        environment = {**os.environ, "TRACEWIRE_URL": one.engines_url()}
        engine = subprocess.Popen([sys.executable, "-m", "tracewire.cli", *ENGINE["args"]], env=environment)
        try:
            startup = ENGINE["startupProbe"]["exec"]["command"]
            with anyio.fail_after(4 * PATIENCE):
                while (await one.run(startup)).returncode != 0:
                    await anyio.sleep(1)
            for name, command in probes():
                assert (await one.run(command)).returncode == 0, name
            async with (
                tracewire.connect(one.url("controller")) as client,
                client.trace("demo", "def f(", max_tokens=20, ignore_eos=True) as trace,
            ):
                assert len((await trace.result()).token_ids) == 20
            said = await one.run(ENGINE["lifecycle"]["preStop"]["exec"]["command"])
            assert said.returncode == 0, said
            assert await anyio.to_thread.run_sync(engine.wait, PATIENCE) == 0
        finally:
            engine.kill()
            engine.wait()
