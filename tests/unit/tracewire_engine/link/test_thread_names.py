"""Threads are known by their names."""

from __future__ import annotations

import threading
from pathlib import Path

from tracewire_engine.link.thread_names import NAMED, name_thread


def test_a_thread_has_its_name_alone() -> None:
    found: list[str] = []

    def look() -> None:
        name_thread("tested")
        found.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [f"{NAMED}tested"]
    assert not Path("/proc/self/comm").read_text().startswith(NAMED)
