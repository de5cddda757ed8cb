"""What a worker does behind its answers, and where the processes of an engine run. No engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tracewire_engine.answering import AfterAnswer


def process_of(done: list[Any]) -> type:
    """A class that answers as vLLM's worker processes do."""

    class Process:
        def handle_output(self, output: Any) -> None:
            done.append(output)

    return Process


def test_work_is_done_behind_the_answer() -> None:
    done: list[Any] = []
    after, process = AfterAnswer(), process_of(done)
    after.follow(process)
    one = process()
    after.put(lambda: done.append("at once: nothing has been answered yet"))
    one.handle_output("loaded")
    for step in range(2):
        after.put(lambda step=step: done.append(f"report {step}"))
        one.handle_output(f"answer {step}")
    assert done == ["at once: nothing has been answered yet", "loaded", "answer 0", "report 0", "answer 1", "report 1"]


def test_work_is_done_once_and_before_what_follows() -> None:
    done: list[Any] = []
    after, process = AfterAnswer(), process_of(done)
    after.follow(process)
    one = process()
    one.handle_output("loaded")
    after.put(lambda: done.append("first"))
    after.put(lambda: done.append("second"))
    after.finish()
    after.finish()
    one.handle_output("answer")
    assert done == ["loaded", "first", "second", "answer"]


def test_a_failure_is_the_next_calls() -> None:
    def fail() -> None:
        raise ValueError("no report")

    done: list[Any] = []
    after, process = AfterAnswer(), process_of(done)
    after.follow(process)
    one = process()
    one.handle_output("loaded")
    after.put(fail)
    one.handle_output("answer")
    assert done == ["loaded", "answer"], "one answer to each call"
    with pytest.raises(ValueError, match="no report"):
        after.finish()
    after.finish()


PLACED = """
import os, subprocess, sys, threading
from tracewire_engine.cores import keep_off_workers
own = sorted(os.sched_getaffinity(0))
held = threading.Event()
threading.Thread(target=held.wait, daemon=True).start()
sleep = [sys.executable, "-c", "import sys; sys.stdin.read()"]
free, bound = (subprocess.Popen(sleep, stdin=subprocess.PIPE) for _ in range(2))
before = keep_off_workers()
os.sched_setaffinity(bound.pid, own[:1])
rest = keep_off_workers()
expected = set(own[1:])
assert before == set(), before
assert rest == expected, rest
tasks = [int(task) for task in os.listdir("/proc/self/task")]
assert len(tasks) > 1
for task in [*tasks, free.pid]:
    assert os.sched_getaffinity(task) == (expected or set(own)), task
assert os.sched_getaffinity(bound.pid) == set(own[:1])
for one in (free, bound):
    one.stdin.close()
    one.wait()
print("placed")
"""


def test_an_engine_keeps_off_its_workers_cores() -> None:
    """Where there are others: on a machine of one core, all stay where they are."""
    ran = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "placed\n", ran.stderr
