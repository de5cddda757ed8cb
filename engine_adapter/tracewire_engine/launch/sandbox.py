"""`tracewire engine --sandbox`: the processes that run blocks see no network and write no files, by bubblewrap.

vLLM starts EngineCore by Python's `multiprocessing`, and EngineCore starts the workers. The adapter has
`multiprocessing` start a script in place of Python, which starts Python in a sandbox. Everything that EngineCore starts
is in there too, and so are the adapter's processes that compile sources.

In the sandbox there is no network but a loopback of its own: the link to the adapter consists of unix sockets and files
in one folder. The root is read-only, `/tmp` and the folders of a user's secrets are empty, there are no capabilities
and no new privileges, other processes are invisible, and a seccomp filter refuses system calls that a model does not
need. So the model must be on this machine: a folder, or in the hub's cache.

`NOT_CONTAINED` says what a block can do all the same.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import multiprocessing.spawn
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tracewire_bus.owned_folder import OwnedFolder

__all__ = ["NOT_CONTAINED", "SandboxError", "outside", "sandbox", "seccomp_filter"]

logger = logging.getLogger("tracewire")

NOT_CONTAINED: Final = (
    "the sandbox does not separate traces from each other: a block runs in the model's process, so it can read the "
    "weights and all requests in there, report anything to the adapter in their place, use up processors and memory, "
    "and reach the accelerator's driver"
)

#: The longest name of a socket in the shared folder, or a longer one: of the link, in a folder of its own.
_LONGEST: Final = len("tracewire-link-12345678/adapter-999/link-blobs")

#: Folders and files of a home that hold secrets: they are empty in the sandbox.
_HIDDEN: Final = (
    *(".ssh", ".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".netrc", ".git-credentials", ".pypirc"),
    *(".local/share/keyrings", ".bash_history", ".python_history"),
)
#: Caches that vLLM and torch write, by the environment variable that names the folder.
_CACHES: Final = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CONFIG_ROOT": "config",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
}
#: System calls that are refused: of other processes' memory, kernel modules, keys, mounts, tracing, new namespaces.
#: By machine, the architecture's audit number and the calls' numbers.
_REFUSED: Final = {
    "x86_64": (
        0xC000003E,
        (
            *(101, 134, 139, 153, 154, 155, 156, 161, 163, 165, 166, 167, 168, 169, 172, 173, 174, 175, 176, 177, 178),
            *(179, 180, 212, 246, 248, 249, 250, 272, 298, 303, 304, 308, 310, 311, 312, 313, 320, 321, 323),
            *(425, 426, 427, 428, 429, 430, 431, 432, 433, 442),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(39, 40, 41, 42, 51, 58, 60, 89, 97, 104, 105, 106, 117, 142, 217, 218, 219, 224, 225, 241, 264, 265),
            *(268, 270, 271, 272, 273, 280, 282, 294, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442),
        ),
    ),
}


class SandboxError(ValueError):
    """This machine cannot make the sandbox."""


def seccomp_filter(machine: str = "") -> bytes:
    """The program of a seccomp filter that refuses `_REFUSED` with EPERM; `b""` on an unknown kind of machine."""
    known = _REFUSED.get(machine or platform.machine())
    if known is None:
        return b""
    architecture, calls = known
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    # Calls of another architecture, such as 32-bit ones, have other numbers: all of them are refused.
    program = [step(load, 4), step(equal, architecture, 1, 0), step(give, refuse), step(load, 0)]
    if architecture == 0xC000003E:
        # The x32 calls, whose numbers have this bit.
        program += [step(0x35, 0x40000000, 0, 1), step(give, refuse)]
    for number in calls:
        program += [step(equal, number, 0, 1), step(give, refuse)]
    return b"".join([*program, step(give, allow)])


@contextmanager
def sandbox(writable: Sequence[Path] = (), hidden: Sequence[Path] = ()) -> Iterator[Path]:
    """Have `multiprocessing` start processes in a sandbox while the context lasts. Yields the folder that they share.

    Args:
        writable: folders beside the shared one that they may write to.
        hidden: files and folders that they cannot read.

    Raises:
        SandboxError: bubblewrap is not installed, or may not do here what it must; the text says which.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("--sandbox needs bubblewrap: no program bwrap is on the PATH (Debian's package bubblewrap)")
    before = tempfile.tempdir, {name: os.environ.get(name) for name in ("TMPDIR", *_CACHES)}
    with OwnedFolder("tracewire-sandbox-", _LONGEST) as owned:
        folder, name = owned.path, str(owned.path)
        script = _script(program, folder, writable, hidden)
        _try_out(script)
        os.environ |= {"TMPDIR": name, **{variable: f"{name}/{cache}" for variable, cache in _CACHES.items()}}
        tempfile.tempdir = name
        multiprocessing.set_executable(str(script))
        logger.warning("workers run in a sandbox; %s", NOT_CONTAINED)
        try:
            yield folder
        finally:
            multiprocessing.set_executable(sys.executable)
            tempfile.tempdir = before[0]
            for variable, value in before[1].items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value


@contextmanager
def outside() -> Iterator[None]:
    """Have `multiprocessing` start processes outside the sandbox while the context lasts: further adapters."""
    inside = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(sys.executable)
    try:
        yield
    finally:
        multiprocessing.set_executable(inside)


def _script(program: str, folder: Path, writable: Sequence[Path], hidden: Sequence[Path]) -> Path:
    """Write the script that starts Python in the sandbox."""
    home = Path.home()
    given = [
        *("--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),  # noqa: S108  # nosec B108
        *("--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"),
        *("--unshare-user", "--uid", "65534", "--gid", "65534", "--disable-userns", "--cap-drop", "ALL"),
    ]
    for path in _installed_in(Path("/tmp")):  # noqa: S108  # nosec B108
        given += ["--ro-bind", str(path), str(path)]
    for path in (*(home / one for one in _HIDDEN), *hidden):
        if path.is_dir():
            given += ["--tmpfs", str(path)]
        elif path.exists():
            given += ["--ro-bind", "/dev/null", str(path)]
    for path in (folder, *writable):
        given += ["--bind", str(path), str(path)]
    script, filter_file = folder / "python", folder / "seccomp"
    program_of_filter = seccomp_filter()
    opened = ""
    if program_of_filter:
        filter_file.write_bytes(program_of_filter)
        opened = f"exec 9<{shlex.quote(str(filter_file))}\n"
        given += ["--seccomp", "9"]
    script.touch(mode=0o700)
    # A process in the sandbox must not write what starts the next one.
    for path in (script, filter_file):
        given += ["--ro-bind-try", str(path), str(path)]
    command = shlex.join([program, *given, "--", sys.executable])
    script.write_text(f'#!/bin/sh\n{opened}exec {command} "$@"\n')
    return script


def _installed_in(folder: Path) -> list[Path]:
    """The folders below `folder` from which this Python runs and imports."""
    used = {Path(one).resolve() for one in (sys.prefix, sys.base_prefix, *sys.path) if one}
    return sorted(path for path in used if path.is_dir() and folder in path.parents)


def _try_out(script: Path) -> None:
    """Start Python in the sandbox once.

    Raises:
        SandboxError: it does not start.
    """
    try:
        done = subprocess.run([str(script), "-c", "print(7)"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"--sandbox: bubblewrap did not start: {error}") from error
    if done.stdout.strip() != "7":
        said = " ".join(done.stderr.split())[-500:]
        raise SandboxError(f"--sandbox: bubblewrap may not make a sandbox here (user namespaces?): {said}")
