"""Background tasks that failed by a mistake of the program, in this process or in an engine's log.

`tracewire_bus.transport.tasks` restarts such a task, so that a test may pass all the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

#: Errors that no Redis and no network causes.
_MISTAKES = (
    "AttributeError",
    "NameError",
    "UnboundLocalError",
    "TypeError",
    "KeyError",
    "IndexError",
    "AssertionError",
)
_SAID = re.compile(rf"^.*the task .* failed, and restarts in .*: (?:{'|'.join(_MISTAKES)})\(.*$", re.MULTILINE)


def failed_tasks(log: str) -> list[str]:
    """The lines of a log that tell of one."""
    return _SAID.findall(log)


@contextmanager
def none_fails() -> Iterator[None]:
    """Raises behind the context if a task of this process failed within it."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.extend(failed_tasks(record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("tracewire")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not said, said
