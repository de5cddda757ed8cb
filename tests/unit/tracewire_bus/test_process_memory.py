"""The memory of a process that serves for long."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from tracewire_bus.process_memory import settle_memory

gc.disable()
settle_memory()
# What was made before stays unwatched, and what is made now is watched.
assert gc.get_freeze_count() > 10_000
assert gc.isenabled() and gc.get_threshold()[0] == 10_000
assert len(gc.get_objects()) < 1_000
"""


def test_a_process_settles() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)
