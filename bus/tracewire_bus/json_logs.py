"""Lines of a log as JSON objects."""

from __future__ import annotations

import logging
import os
from typing import Any

from pythonjsonlogger.json import JsonFormatter as Base

from .log_fields import current_log_fields

__all__ = ["JsonFormatter"]

_NAMES = {"levelname": "level", "name": "logger", "exc_info": "exception", "stack_info": "stack"}


class JsonFormatter(Base):
    """Formats a record as `{"time", "level", "logger", "message", "pid", ...}` in one line.

    `time` is in UTC, by ISO 8601. The other fields are those of the task that logs (`log_fields.py`), and `exception`
    with the traceback where there is one.
    """

    def __init__(self) -> None:
        super().__init__("{levelname}{name}{message}", style="{", timestamp="time", rename_fields=_NAMES)

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Add the record's fields to the object that is logged."""
        super().add_fields(log_data, record, message_dict)
        log_data["pid"] = os.getpid()
        log_data.update(current_log_fields())
