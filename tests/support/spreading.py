"""How processes share a session's tests (`pytest -n`): a file at a time, and the files of one engine together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support import ROOT

__all__ = ["Spreading", "check", "group", "sort"]

#: The files whose tests ask for the shared engine. One process runs them all, so that it starts once.
_SHARED = tuple(f"tests/e2e/{folder}/" for folder in ("edits", "gateway", "parallel", "runners", "speculation"))
_SHARED += ("tests/e2e/steering/", "tests/e2e/tracing/", "tests/e2e/dashboard/test_engine.py")
_SHARED += ("tests/e2e/security/test_engine_http.py", "tests/e2e/serving/test_chat_backend.py")
_SHARED += ("tests/e2e/serving/test_secrets.py", "tests/examples/test_cookbook.py", "tests/examples/test_products.py")
_SHARED += ("tests/test_benchmarks.py", "tests/test_commands.py")

#: Those among them that have an engine of their own, and its group.
_OWN = {
    "tests/e2e/steering/test_many.py": "inside",
    "tests/e2e/steering/test_pause.py": "pause",
    "tests/e2e/tracing/test_later_kinds.py": "later kinds",
    "tests/e2e/tracing/test_nnsight_reference.py": "inside",
}


def group(path: str) -> str:
    """The group of a file of tests, by its path below the project: its engine's, or its own."""
    return _OWN.get(path) or ("engine" if path.startswith(_SHARED) else path)


class Spreading(LoadFileScheduling):  # type: ignore[misc]
    """The tests of a group go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group(super()._split_scope(nodeid))

    def _reschedule(self, node: Any) -> None:
        """Give a process more tests, or let it end.

        A process runs a test when it has the next one, or knows that none comes. If a process has died, xdist gives one
        group of its tests to the process that takes its place. It does not look whether any of them is left to run.
        """
        for scope in [scope for scope, tests in self.workqueue.items() if all(tests.values())]:
            del self.workqueue[scope]
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()


def check(items: list[pytest.Item]) -> None:
    """Check that the files whose tests ask for the shared engine are in its group.

    Raises:
        UsageError: one is not.
    """
    for item in _asking(items, "starting"):
        if group(path := _path(item)) != "engine":
            raise pytest.UsageError(f"{path} asks for the shared engine: name it in tests/support/spreading.py")


def sort(items: list[pytest.Item]) -> None:
    """Sort the tests by how early a process is to take their group.

    The longest group comes first, that of the shared engine, and then who starts another engine. The others, which are
    short, fill the time up.
    """
    short = [item for item in _asking(items, "starts_engine") if not item.get_closest_marker("full")]
    starting = {group(_path(item)) for item in short}
    items.sort(key=lambda item: (group(_path(item)) != "engine", group(_path(item)) not in starting))


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _asking(items: Iterable[pytest.Item], fixture: str) -> Iterable[pytest.Item]:
    return (item for item in items if fixture in getattr(item, "fixturenames", ()))
