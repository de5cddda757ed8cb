"""How processes log."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tracewire_bus.logs import configure_logging, kept_logging


@pytest.mark.parametrize(("form", "begins"), [("text", "20"), ("json", "{")])
def test_a_process_logs_in_the_form_that_is_asked_for(form: str, begins: str) -> None:
    program = f"""
import logging
from tracewire_bus.logs import configure_logging
configure_logging({form!r})
logging.getLogger("tracewire").debug("not this")
logging.getLogger("tracewire").info("served %s", "it")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith(begins)
    assert "served it" in line


def test_a_process_that_logs_already_goes_on_as_it_does() -> None:
    before = list(logging.getLogger().handlers)
    assert before
    configure_logging()
    assert logging.getLogger().handlers == before


def test_no_message_forges_a_line_or_moves_the_cursor() -> None:
    program = """
import logging
from tracewire_bus.logs import configure_logging
configure_logging()
name = "t\\n2026-01-01 tracewire ERROR all is lost\\r\\x1b[2J\\u202e\\x85"
logging.getLogger("tracewire").warning("queue entry %s could not be served\\tnow", name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stderr.splitlines()
    assert first.endswith("queue entry t")
    assert second == "    2026-01-01 tracewire ERROR all is lost\\x0d\\x1b[2J\\u202e\\x85 could not be served\tnow"


def test_imports_that_reconfigure_the_root_logger_change_nothing() -> None:
    """As a package does that vLLM's HTTP server imports: errors only, and a handler of its own."""
    root = logging.getLogger()
    level, handlers = root.level, [(one, one.level) for one in root.handlers]
    assert handlers
    with kept_logging():
        root.setLevel(logging.ERROR)
        for handler in root.handlers:
            handler.setLevel(logging.ERROR)
        root.addHandler(logging.StreamHandler())
    assert root.level == level
    assert [(one, one.level) for one in root.handlers] == handlers
