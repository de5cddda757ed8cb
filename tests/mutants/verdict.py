"""A pytest plugin that writes down each failure as it happens, one JSON object a line, also of a run that is killed."""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

#: Which file it writes to.
VARIABLE = "TRACEWIRE_MUTANT_VERDICT"


def _write(test: str, when: str, kinds: list[str], message: str) -> None:
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps({"test": test, "when": when, "kinds": kinds, "message": message[:2000]}) + "\n")


def _kinds(error: BaseException) -> Iterator[str]:
    """The names of an error's type, of its causes, and of what a group of errors holds."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield type(one).__name__
        waiting += [one.__cause__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Note what failed, in which phase and with which errors."""
    report = yield
    if report.failed:
        _write(item.nodeid, call.when, list(_kinds(call.excinfo.value)), str(call.excinfo.value))
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note what could not even be collected."""
    if report.failed:
        _write(report.nodeid, "collect", [], str(report.longrepr))
