"""The shared memory of an engine's processes, which has names in `/dev/shm` until somebody removes them.

vLLM's processes remove their own. If all of them are killed at once, nobody does.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from tracewire_bus.mapped_files import SHARED, mapped_files

__all__ = ["shared_files"]


def shared_files() -> list[Path]:
    """The files of `/dev/shm` that this process and those below it map. Those of a folder in there are not meant."""
    here = psutil.Process()
    mapped = mapped_files([here.pid, *(child.pid for child in here.children(recursive=True))])
    found = []
    with suppress(OSError), os.scandir(SHARED) as entries:
        for entry in entries:
            with suppress(OSError):
                # By its number: a semaphore is mapped under the name that it had before its present one.
                status = entry.stat(follow_symlinks=False)
                if (status.st_dev, status.st_ino) in mapped:
                    found.append(Path(entry.path))
    return found
