"""A guard that runs beside a test, and an engine that steps as the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import pytest

from tests.support.guards import audited, rules
from tracewire import Client, Guard
from tracewire.guards.audit import AuditLine


class Watched(Guard):
    """A guard whose decisions a test sees."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.lines: list[AuditLine] = []
        self.has_joined = anyio.Event()

    async def joined(self) -> None:
        """Say so."""
        self.has_joined.set()

    async def decided(self, line: AuditLine) -> None:
        """Keep it."""
        self.lines.append(line)


Guarded: TypeAlias = Callable[..., AbstractAsyncContextManager[Watched]]


@pytest.fixture
def guarded(client: Client, tmp_path: Path) -> Guarded:
    """Runs a guard: `async with guarded(rule={...}):`. Its audit is checked against what it says."""

    @asynccontextmanager
    async def running(kind: type[Watched] = Watched, **given: Any) -> AsyncIterator[Watched]:
        path = tmp_path / "audit.jsonl"
        guard = kind(client, rules(**{"idle": 2.0, "audit": str(path), **given}), name="g")
        async with anyio.create_task_group() as group:
            group.start_soon(guard.run)
            await guard.has_joined.wait()
            yield guard
            group.cancel_scope.cancel()
        assert sorted(line["outcome"] for line in audited(path)) == sorted(line.outcome for line in guard.lines)

    return running
