"""The shared memory that processes map."""

from __future__ import annotations

import os
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tracewire_bus.mapped_files import SHARED, mapped_files


def test_what_a_process_maps_is_found_until_it_does_no_longer(tmp_path: Path) -> None:
    memory = SharedMemory(create=True, size=64)
    status = (SHARED / memory.name).stat()
    file = status.st_dev, status.st_ino
    try:
        assert file in mapped_files()
        assert file in mapped_files([os.getpid()])
        # The first process of all is another one, and no process has the number 0.
        assert file not in mapped_files([0, 1])
        memory.close()
        assert file not in mapped_files([os.getpid()])
    finally:
        memory.unlink()
