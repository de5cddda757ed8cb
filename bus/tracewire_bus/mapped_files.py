"""The files that processes map into their memory, from `/proc`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["SHARED", "mapped_files"]

#: The folder of shared memory that has names.
SHARED: Final = Path("/dev/shm")  # noqa: S108  # nosec B108


def mapped_files(processes: Iterable[int] | None = None) -> set[tuple[int, int]]:
    """The devices and inodes of the files in `/dev/shm` that these processes map; `None` for all processes."""
    if processes is None:
        processes = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
    found = set()
    for process in processes:
        # A process may end meanwhile, or be another user's.
        with suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                _, _, _, device, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith(f"{SHARED}/"):
                    major, _, minor = device.partition(":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found
