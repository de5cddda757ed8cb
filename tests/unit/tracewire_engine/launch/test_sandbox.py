"""What a process in the sandbox can do, and that the filter is the program that the kernel takes.

The sandbox itself is tested where there is bubblewrap, whose program `bwrap` is on the PATH.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_owner import left_by_killed
from tracewire_engine.launch import sandbox as module
from tracewire_engine.launch.sandbox import SandboxError, outside, sandbox, seccomp_filter

there = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def _outcome(attempt: Callable[..., Any], *arguments: Any) -> str:
    try:
        return repr(attempt(*arguments))
    except OSError as error:
        return type(error).__name__ + f" {error.errno}"


def _write(path: str) -> int:
    return Path(path).write_text("x")


def _read(path: str) -> str:
    return Path(path).read_text()


def _connect(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return "connected"


def _call(number: int) -> str:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    returned = libc.syscall(number, 0, 0, 0, 0, 0)
    return f"{returned} {ctypes.get_errno()}"


def _inside(queue: Any, shared: str, secret: str, port: int, pid: int) -> None:
    attempts: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "connect": (_connect, (port,)),
        "write the root": (_write, ("/etc/tracewire-was-here",)),
        "write beside": (_write, (f"{Path(sys.executable).parent}/tracewire-was-here",)),
        "read a hidden file": (_read, (secret,)),
        "write the shared folder": (_write, (f"{shared}/written",)),
        "write what starts the next": (_write, (f"{shared}/python",)),
        "replace what starts the next": (os.rename, (f"{shared}/python", f"{shared}/other")),
        "remove what starts the next": (os.unlink, (f"{shared}/python",)),
        "write the next one's filter": (_write, (f"{shared}/seccomp",)),
        "move the shared folder": (os.rename, (shared, f"{shared}-other")),
        "signal the parent": (os.kill, (pid, 0)),
        "who": (os.getuid, ()),
        "privileges": (_read, ("/proc/self/status",)),
        "ptrace": (_call, (101,)),
        "process_vm_readv": (_call, (310,)),
        "unshare": (_call, (272,)),
    }
    queue.put({name: _outcome(attempt, *given) for name, (attempt, given) in attempts.items()})


@there
def test_the_next_engine_removes_the_folder_of_one_that_was_killed() -> None:
    makes = """
from tracewire_engine.launch.sandbox import sandbox
held = sandbox()
path = held.__enter__()
"""
    left = left_by_killed(makes)
    assert (left / "python").exists()
    with sandbox() as shared:
        assert not left.exists()
        assert shared.exists()
    assert not shared.exists()


@there
def test_a_process_in_the_sandbox_reaches_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text("redis://:sesame@host")
    with socket.create_server(("127.0.0.1", 0)) as server, sandbox(hidden=[secret]) as shared:
        assert tempfile.gettempdir() == str(shared)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        arguments = (queue, str(shared), str(secret), server.getsockname()[1], os.getpid())
        process = context.Process(target=_inside, args=arguments)
        process.start()
        found = queue.get(timeout=60)
        process.join(60)
        assert (shared / "written").read_text() == "x"
        script = multiprocessing.spawn.get_executable()
        with outside():
            # As further adapters start, which reach Redis.
            assert os.fsdecode(multiprocessing.spawn.get_executable()) == sys.executable
        assert multiprocessing.spawn.get_executable() == script
    assert found["connect"].startswith(("ConnectionRefusedError", "OSError"))
    assert found["write the root"].startswith("OSError 30")
    assert found["write beside"].startswith("OSError 30")
    assert "sesame" not in found["read a hidden file"]
    assert found["write what starts the next"].startswith("OSError 30")
    assert found["write the next one's filter"].startswith("OSError 30")
    for name in ("replace what starts the next", "remove what starts the next", "move the shared folder"):
        assert found[name].startswith(("OSError 16", "OSError 18", "OSError 30", "PermissionError")), name
    assert found["signal the parent"].startswith("ProcessLookupError")
    assert found["who"] == "65534"
    assert "NoNewPrivs:\\t1" in found["privileges"]
    assert "CapEff:\\t0000000000000000" in found["privileges"]
    if os.uname().machine == "x86_64":
        assert {found[name] for name in ("ptrace", "process_vm_readv", "unshare")} == {"'-1 1'"}
    assert not Path("/etc/tracewire-was-here").exists()
    # Afterwards processes start as before.
    assert tempfile.gettempdir() != str(shared)
    assert multiprocessing.get_context("spawn").Process is not None


def test_without_bubblewrap_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="Debian's package bubblewrap"), sandbox():
        pytest.fail("it began")


def test_a_bubblewrap_that_may_not_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o700)
    monkeypatch.setattr(shutil, "which", lambda name: str(refusing))
    with pytest.raises(SandboxError, match="No permissions to create new namespace"), sandbox():
        pytest.fail("it began")


def _run(program: bytes, architecture: int, number: int) -> int:
    """What a filter returns for a system call: the few instructions that it has, as the kernel runs them."""
    at, value = 0, 0
    while True:
        code, yes, no, operand = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            value = {0: number, 4: architecture}[operand]
        elif code == 0x15:
            at += yes if value == operand else no
        elif code == 0x35:
            at += yes if value >= operand else no
        else:
            return int(operand)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(machine: str) -> None:
    architecture, calls = module._REFUSED[machine]
    program = seccomp_filter(machine)
    for number in range(500):
        assert (_run(program, architecture, number) != 0x7FFF0000) is (number in calls)
    assert _run(program, 0x40000003, 1) == 0x00050001
    if machine == "x86_64":
        assert _run(program, architecture, 0x40000001) == 0x00050001
    assert seccomp_filter("sparc") == b""
