"""Lines of a log as JSON objects."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from tracewire_bus.json_logs import JsonFormatter
from tracewire_bus.log_fields import log_fields


def line(message: str, *arguments: Any, **more: Any) -> dict[str, Any]:
    """A line, as it is read again."""
    record = logging.LogRecord("tracewire.gateway", logging.WARNING, "file", 1, message, arguments, None)
    record.__dict__.update(more)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_is_an_object_with_the_task_s_fields() -> None:
    with log_fields(trace_id="t", client="alice"):
        found = line('trace %s said "%s"\n', "t", "é")
    at = datetime.fromisoformat(found.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 60
    assert found == {
        "level": "WARNING",
        "logger": "tracewire.gateway",
        "message": 'trace t said "é"\n',
        "pid": os.getpid(),
        "trace_id": "t",
        "client": "alice",
    }


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        found = line("failed", exc_info=(ValueError, error, error.__traceback__))
    assert found["exception"].endswith("ValueError: broken")
