"""Names that stand only in code that cannot run, which need no value."""

# mypy: ignore-errors

from __future__ import annotations

import pathlib
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.block_runs import run
from tracewire import BlockError, UntransportableVariable, intervention

DEBUG = False
VERBOSE = 2
LOCK = __import__("threading").Lock()
SETTINGS = types.SimpleNamespace(debug=False)


def logging_helper(x):
    if DEBUG:
        undefined_logger.info(x)  # noqa: F821
        LOCK.acquire()
    return x


DEAD = [
    "if DEBUG:\n    undefined_name(LOCK)",
    "if not VERBOSE == 2:\n    undefined_name",
    "if VERBOSE > 1 and DEBUG is True:\n    LOCK",
    "y = undefined_name if DEBUG else 2",
    "DEBUG and undefined_name.info('x')",
    "VERBOSE or LOCK.acquire()",
    "while DEBUG:\n    LOCK.acquire()",
    "if TYPE_CHECKING:\n    from x import undefined_name\n    undefined_name",
    "if SETTINGS.debug:\n    undefined_name",
    "if VERBOSE:\n    y = 1\nelse:\n    undefined_name",
    "y = logging_helper(1)",
]
ALIVE = [
    "if VERBOSE:\n    undefined_name",
    "if DEBUG:\n    pass\nelse:\n    LOCK",
    "DEBUG = True\nif DEBUG:\n    undefined_name",
    "if len('a') > 2:\n    undefined_name",
    "if DEBUG:\n    LOCK\nLOCK",
]


def block_of(folder: pathlib.Path, body: str) -> Callable[[], Any]:
    path = folder / "dead.py"
    path.write_text("def watch(model, tracer, live):\n" + textwrap.indent(body, "    ") + "\n    out = 1\n")
    names = {"__name__": "dead", "__file__": str(path)}
    names |= {name: globals()[name] for name in ("DEBUG", "VERBOSE", "LOCK", "SETTINGS", "logging_helper")}
    names["TYPE_CHECKING"] = False
    exec(compile(path.read_text(), str(path), "exec"), names)
    return intervention(names["watch"]).block


@pytest.mark.parametrize("body", DEAD)
def test_names_in_code_that_does_not_run_need_no_value(body: str, tmp_path: pathlib.Path) -> None:
    assert run(block_of(tmp_path, body)())["out"] == 1


@pytest.mark.parametrize("body", ALIVE)
def test_names_in_code_that_may_run_do(body: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises((BlockError, UntransportableVariable), match=r"undefined_name|LOCK"):
        block_of(tmp_path, body)()


def test_a_variable_that_only_dead_code_uses() -> None:
    @intervention
    def watch(model, tracer, live, debug, sink):
        out = 1
        if debug:
            sink.write("x")

    assert run(watch(debug=False, sink=LOCK).block())["out"] == 1
    with pytest.raises(UntransportableVariable, match="'sink'"):
        watch(debug=True, sink=LOCK).block()
