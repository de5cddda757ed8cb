"""A process ends with the one that started it, and only where it should."""

from __future__ import annotations

import subprocess
import sys

import psutil

#: Starts a child that asks to die with it, and waits.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
_CHILD = """
import os, sys, time
os.environ["TRACEWIRE_ADAPTER_PID"] = sys.argv[1] if len(sys.argv) > 1 else "{adapter}"
from tracewire_engine.launch.parent_death import register
register()
print("ready", flush=True)
time.sleep(600)
"""


def _orphaned(adapter: str) -> psutil.Process:
    """A process that has called `register` below `adapter`, and whose parent was killed."""
    command = [sys.executable, "-c", _PARENT, _CHILD.format(adapter=adapter)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    return child


def test_a_process_below_an_adapter_dies_with_its_parent() -> None:
    _orphaned("1").wait(60)


def test_any_other_process_lives_on() -> None:
    child = _orphaned("")
    try:
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()
        child.wait(60)
