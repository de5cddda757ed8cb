"""The shared memory of this process and of those below it is found by name."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

from tracewire_bus.mapped_files import SHARED
from tracewire_engine.launch.shared_files import shared_files

MAPS = """
import sys
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=64)
print(memory.name, flush=True)
sys.stdin.read()
memory.close()
memory.unlink()
"""


def test_what_a_process_and_those_below_it_map_is_found() -> None:
    own, closed = SharedMemory(create=True, size=64), SharedMemory(create=True, size=64)
    closed.close()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    child = subprocess.Popen(
        [sys.executable, "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        below = child.stdout.readline().strip()
        found = shared_files()
        assert {SHARED / own.name, SHARED / below} <= set(found)
        assert SHARED / closed.name not in found
        # Python's semaphores with a name have that of their file without what the kernel's library puts before it.
        assert SHARED / f"sem.{semaphore._semlock.name[1:]}" in found  # type: ignore[attr-defined]
    finally:
        child.communicate()
        own.close()
        own.unlink()
        closed.unlink()
    assert SHARED / below not in shared_files()
