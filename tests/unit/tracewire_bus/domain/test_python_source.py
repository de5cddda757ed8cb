"""Sources that parse while the garbage collector lets other parses in between."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tracewire_bus.domain.python_source import parse_source

SOURCE = "\n".join(f"def f{i}(a):\n    return [a + {i}, (a, {i})]" for i in range(200))
#: CPython counts per tree since 3.13.
COUNTS_TOGETHER = sys.version_info < (3, 13)


@pytest.fixture
def disturb() -> Iterator[Callable[[int], list[int]]]:
    """Lets the garbage collector parse a source in the middle of another parse, as often as is said."""
    before = gc.get_threshold()
    added: list[Callable[[str, dict[str, Any]], None]] = []

    def begin(times: int) -> list[int]:
        done = [0]

        def parse_another(phase: str, _: dict[str, Any]) -> None:
            if phase == "start" and "parse_source" in _frames() and done[0] < times:
                done[0] += 1
                parse_deeper(7)

        added.append(parse_another)
        gc.callbacks.append(parse_another)
        gc.set_threshold(10)
        return done

    yield begin
    gc.set_threshold(*before)
    for callback in added:
        gc.callbacks.remove(callback)


def parse_deeper(frames: int) -> None:
    """Parse that many frames deeper, where the depth that CPython counts is another one."""
    if frames:
        parse_deeper(frames - 1)
    else:
        ast.parse("x = 1")


def _frames() -> list[str]:
    names, frame = [], sys._getframe(1)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_source_is_parsed_between_others(disturb: Callable[[int], list[int]], times: int) -> None:
    whole = ast.dump(ast.parse(SOURCE))
    done = disturb(times)
    assert ast.dump(parse_source(SOURCE)) == whole
    assert done == [times]


def test_a_parse_that_is_always_disturbed_ends(disturb: Callable[[int], list[int]]) -> None:
    done = disturb(10**9)
    with pytest.raises(SystemError, match="recursion depth") if COUNTS_TOGETHER else nullcontext():
        parse_source(SOURCE)
    assert done[0] >= (10 if COUNTS_TOGETHER else 1)


@pytest.mark.parametrize(("source", "error"), [("def", SyntaxError), ("a\0b", (SyntaxError, ValueError))])
def test_what_is_no_python_is_refused(source: str, error: Any) -> None:
    with pytest.raises(error):
        parse_source(source)


def test_an_error_names_its_file() -> None:
    with pytest.raises(SyntaxError) as raised:
        parse_source("def", "cell")
    assert raised.value.filename == "cell"
