"""Where the processes of an engine run."""

from __future__ import annotations

import subprocess
import sys

PLACED = """
import os, subprocess, sys, threading
from tracewire_engine.launch.cpu_affinity import keep_off_workers
own = sorted(os.sched_getaffinity(0))
held = threading.Event()
threading.Thread(target=held.wait, daemon=True).start()

def start(text, *cores):
    text = "import os, sys, threading, zmq; " + text + "; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, cores)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    return child

def end(child):
    child.communicate()

def threads(pid):
    tasks = f"/proc/{pid}/task"
    return {
        (open(f"{tasks}/{task}/comm").read().split("/")[0], tuple(sorted(os.sched_getaffinity(int(task)))))
        for task in os.listdir(tasks)
    }

free = start("0")
assert keep_off_workers() == set(), "nobody is bound"

# A worker with a thread on each core leaves none.
bound = start("there = threading.Barrier(len(sys.argv)); "
              "[threading.Thread(target=lambda c=c: (os.sched_setaffinity(0, {int(c)}), there.wait(), "
              "sys.stdin.read()), "
              "daemon=True).start() for c in sys.argv[1:]]; os.sched_setaffinity(0, {int(sys.argv[1])}); there.wait()",
              *own)
assert keep_off_workers() == set(), "no core is left"
assert os.sched_getaffinity(0) == set(own)
end(bound)

bound = start("os.sched_setaffinity(0, {int(sys.argv[1])}); socket = zmq.Context().socket(zmq.PUSH); import glob; "
              # Its two threads have names only when they run.
              "tuple(iter(lambda: sum(open(path).read().startswith('ZMQbg') "
              "for path in glob.glob('/proc/self/task/*/comm')), 2))", own[0])
rest = tuple(own[1:])
assert keep_off_workers() == set(rest)
expected = rest or tuple(own)
for pid in (os.getpid(), free.pid):
    assert {cores for _, cores in threads(pid)} == {expected}, pid
assert len(os.listdir("/proc/self/task")) > 1
assert {cores for name, cores in threads(bound.pid) if name.startswith("ZMQbg")} == {expected}
assert {cores for name, cores in threads(bound.pid) if not name.startswith("ZMQbg")} == {(own[0],)}
for child in (free, bound):
    end(child)
print("placed")
"""


def test_an_engine_keeps_off_its_workers_cores() -> None:
    """Where there are others: on a machine of one core, all stay where they are."""
    ran = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "placed\n", ran.stderr
