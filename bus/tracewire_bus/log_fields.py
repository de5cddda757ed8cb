"""Fields of the lines that a task logs: the trace or the request that the lines are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["add_log_fields", "current_log_fields", "log_fields"]

_fields: ContextVar[Mapping[str, str]] = ContextVar("tracewire_log_fields")


def current_log_fields() -> Mapping[str, str]:
    """The fields of lines that the current task logs."""
    return _fields.get({})


def add_log_fields(**fields: str) -> None:
    """Have lines that this task, and tasks that it starts from now on, log have these fields."""
    _fields.set({**_fields.get({}), **fields})


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Have lines that are logged within the `with` block have these fields."""
    token = _fields.set({**_fields.get({}), **fields})
    try:
        yield
    finally:
        _fields.reset(token)
