"""What a confined process can still do: compute, and read libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
from typing import Any

import pytest

ATTEMPTS = textwrap.dedent(
    """
    import ctypes, json, os, socket, subprocess, sys, threading
    from tracewire_engine.block_host.confinement import confine

    found = {"missing": confine(json.loads(sys.argv[1]), memory=1 << 30)}

    def attempt(name, function):
        try:
            function()
            found[name] = ""
        except BaseException as error:
            found[name] = type(error).__name__

    found["ends first"] = "" if open("/proc/self/oom_score_adj").read().strip() == "1000" else "it does not"
    attempt("computes", lambda: sum(range(1000)))
    attempt("threads", lambda: threading.Thread(target=len, args=("",)).start())
    attempt("imports", lambda: __import__("xml.dom.minidom"))
    attempt("fork", os.fork)
    attempt("subprocess", lambda: subprocess.run(["true"]))
    attempt("exec", lambda: os.execv("/bin/true", ["true"]))
    attempt("signal", lambda: os.kill(os.getppid(), 0))
    attempt("itself", lambda: os.kill(os.getpid(), 9))
    attempt("socket", socket.socket)
    attempt("reads", lambda: open("/etc/passwd"))
    attempt("other", lambda: open(f"/proc/{os.getppid()}/environ"))
    attempt("lists", lambda: os.listdir("/"))
    attempt("writes", lambda: open("/tmp/tracewire-confined", "w"))
    attempt("removes", lambda: os.unlink("/tmp/tracewire-confined-file"))
    attempt("memory", lambda: bytearray(2 << 30))
    attempt("limits", lambda: __import__("resource").setrlimit(9, (1 << 40, 1 << 40)))
    attempt("user", lambda: os.setuid(0))
    libc = ctypes.CDLL(None, use_errno=True)
    for name, number in (("ptrace", 101), ("unshare", 272), ("clone", 56), ("vm", 310), ("io_uring", 425)):
        if os.uname().machine == "x86_64":
            found[name] = "PermissionError" if libc.syscall(number, 0, 0, 0, 0, 0) < 0 else ""
    for name, option in (("outlives its parent", 1), ("has a name", 15)):
        done = libc.prctl(option, ctypes.c_char_p(b"name") if option == 15 else 0, 0, 0, 0)
        found[name] = "PermissionError" if done < 0 else ""
    os.write(1, json.dumps(found).encode())
    os._exit(0)
    """
)

THREADS = textwrap.dedent(
    """
    import os, sys, threading
    from tracewire_engine.block_host import confinement

    # As a process of root does whose libraries that user can read.
    os.setresgid(*[confinement._NOBODY] * 3)
    os.setresuid(*[confinement._NOBODY] * 3)
    confinement._limit(8 << 30)
    threading.stack_size(32768)
    ended, started = threading.Event(), 0
    try:
        for started in range(confinement.MOST_THREADS + 1):
            threading.Thread(target=ended.wait, daemon=True).start()
        print("any number")
    except RuntimeError:
        print("as many as may be" if started > 100 else started)
    sys.stdout.flush()
    os._exit(0)
    """
)

ALLOWED = {"computes", "threads", "imports", "ends first", "has a name"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_run(ATTEMPTS))
    return result


def _run(program: str) -> str:
    readable = ["/usr", "/lib", "/lib64", "/proc/self", *filter(None, sys.path), *sysconfig.get_paths().values()]
    command = [sys.executable, "-c", program, json.dumps(readable)]
    return subprocess.run(command, capture_output=True, check=True, timeout=120, text=True).stdout


def test_a_confined_process_computes(found: dict[str, Any]) -> None:
    assert {name: error for name, error in found.items() if name in ALLOWED} == dict.fromkeys(ALLOWED, "")


def test_a_confined_process_does_nothing_else(found: dict[str, Any]) -> None:
    if found["missing"]:
        pytest.skip(f"this machine's kernel cannot: {found['missing']}")
    assert [name for name, error in found.items() if not error and name not in {*ALLOWED, "missing"}] == []


@pytest.mark.skipif(os.getuid() != 0, reason="a process of another user than root keeps that user's limit")
def test_the_processes_of_the_user_without_rights_have_so_many_threads_together() -> None:
    assert _run(THREADS).strip() == "as many as may be"
