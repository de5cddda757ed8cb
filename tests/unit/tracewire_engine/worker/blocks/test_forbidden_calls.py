"""Calls that would divide or end the process are refused during a turn, and only then. In a process of its own each."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_SETUP = """
import os, signal, subprocess, sys, threading
from tracewire_engine.worker.blocks import forbidden_calls
turn = []
forbidden_calls.install(lambda: bool(turn))
forbidden_calls.install(lambda: True)
"""


def said_by(code: str) -> str:
    """What a program says whose audit hook is installed, and in which `turn` is not empty during a turn."""
    done = subprocess.run(
        [sys.executable, "-c", _SETUP + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "call",
    [
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.killpg(os.getpgid(0), signal.SIGKILL)",
        "signal.pthread_kill(threading.get_ident(), signal.SIGKILL)",
    ],
)
def test_a_call_is_refused_in_a_turn(call: str) -> None:
    code = f"""
    turn.append(1)
    try:
        {call}
    except forbidden_calls.ForbiddenCall as error:
        print(error)
    """
    assert said_by(code).startswith("a block may not call ")


def test_a_block_may_run_a_program_and_end_it() -> None:
    code = """
    turn.append(1)
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    print(child.wait())
    """
    assert said_by(code) == "-9"


def test_outside_turns_and_on_other_threads_nothing_is_refused() -> None:
    code = """
    os.kill(os.getpid(), 0)
    turn.append(1)
    thread = threading.Thread(target=os.kill, args=(os.getpid(), 0))
    thread.start()
    thread.join()
    turn.clear()
    pid = os.fork()
    if not pid:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert said_by(code) == "7"
