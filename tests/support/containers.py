"""Podman as the tests use it, on machines without systemd, behind an index of their own, or with fewer rights."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT

__all__ = ["MISSING", "PYTHON_IMAGE", "REDIS_IMAGE", "Containers"]

#: With this environment's own programs.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PYTHON_IMAGE = "localhost/tracewire-debian-python"
REDIS_IMAGE = "localhost/tracewire-debian-redis"
#: The programs that these tests lack here.
MISSING = [
    name
    for name in ("podman", "podman-compose", "runc", "mmdebstrap", "openssl", "curl")
    if shutil.which(name, path=_PATH) is None
]
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class Containers:
    """Runs programs with podman behind them.

    Attributes:
        environment: the variables of those programs.
        build: options with which `podman build` installs packages as this machine's own pip does.
    """

    def __init__(self, folder: Path) -> None:
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = [f"nofile={min(4096, files)}:{files}", "nproc=4096:4096"]
        # runc, since crun refuses hosts that have both versions of cgroups.
        settings = f'[engine]\nruntime = "runc"\n[containers]\ndefault_ulimits = {limits!r}\n'.replace("'", '"')
        (folder / "containers.conf").write_text(settings)
        self.environment = {
            **os.environ,
            "CONTAINERS": "podman",
            "PATH": _PATH,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "TRACEWIRE_PYTHON_IMAGE": PYTHON_IMAGE,
            "TRACEWIRE_REDIS_IMAGE": REDIS_IMAGE,
        }
        self.build = ["--network", "host", *_as_pip_here(folder)]

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command in the repository's root. Returns what it printed; a failure raises with its errors."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def _as_pip_here(folder: Path) -> list[str]:
    """Options that show a build this machine's certificates, pip's configuration, and the folders that it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings: dict[str, list[str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], []).extend(value.strip("'").split())
    indexes = ("find-links", "extra-index-url", "index-url")
    wanted = {name: values for name, values in settings.items() if name in indexes}
    if Path(_CERTIFICATES).exists():
        wanted["cert"] = [_CERTIFICATES]
    (folder / "pip.conf").write_text(
        "[global]\n" + "".join(f"{name} = {' '.join(dict.fromkeys(values))}\n" for name, values in wanted.items())
    )
    named = [value.removeprefix("file://") for values in wanted.values() for value in values]
    return _volumes([(str(folder / "pip.conf"), "/etc/pip.conf"), *_with_siblings(named)])


def _with_siblings(paths: Sequence[str]) -> list[tuple[str, str]]:
    """The folders of those paths that are here: an index's pages refer to files beside its folder `simple`."""
    here = [Path(path) for path in paths if path.startswith("/") and Path(path).exists()]
    folders = {path if path.is_dir() and path.name != "simple" else path.parent for path in here}
    return [(str(one), str(one)) for one in sorted(folders)]


def _volumes(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [word for inside, outside in pairs for word in ("--volume", f"{inside}:{outside}:ro")]
