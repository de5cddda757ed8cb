"""Errors of traces that ran: of the builtin class that a block raised, and whole after a copy."""

from __future__ import annotations

import builtins
import copy
import pickle  # the tests' own, of errors that a caller sends to another process
import traceback

import pytest

from tracewire import InterventionError, TraceFailed
from tracewire_bus.wire.messages import Failure

EXCEPTIONS = sorted(
    name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, Exception)
)
#: Python replaces the first two where a coroutine raises them; a group would be one of nothing.
LEFT_OUT = {"StopIteration", "StopAsyncIteration", "ExceptionGroup"}


def error(type_: str, builtin: str | None = None) -> InterventionError:
    failure = Failure(
        type=type_, message="no", field="block", filename="mine.py", line=3, source=" x()\n", builtin=builtin
    )
    return InterventionError.of(failure, "t")


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_error_is_of_the_builtin_class_that_the_block_raised(name: str) -> None:
    raised = error(name, name)
    assert isinstance(raised, getattr(builtins, name)) == (name not in LEFT_OUT)
    assert isinstance(raised, TraceFailed)
    text = f"{name}: no\n  at mine.py:3\n    x()"
    for one in (raised, copy.copy(raised), copy.deepcopy(raised), pickle.loads(pickle.dumps(raised))):
        assert type(one) is type(raised)
        assert str(one) == text
        assert one.args == (text,)
        assert (one.type, one.message, one.filename, one.line, one.source) == (name, "no", "mine.py", 3, "x()")
        assert (one.trace_id, one.status, one.result) == ("t", "failed", None)
        assert "".join(traceback.format_exception(one)).startswith("tracewire.InterventionError: ")
        assert text in "".join(traceback.format_exception(one))


def test_an_exception_of_one_s_own_class_counts_as_its_nearest_builtin_base() -> None:
    with pytest.raises(KeyError) as caught:
        raise error("Mine", "KeyError")
    assert caught.value.type == "Mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize("builtin", ["Exception", "BaseException", "SystemExit", "KeyboardInterrupt", "print", "gone"])
def test_other_names_make_a_plain_intervention_error(builtin: str) -> None:
    assert type(error("Mine", builtin)) is InterventionError


def test_an_old_engine_says_the_type_only() -> None:
    assert isinstance(error("ValueError"), ValueError)
    assert type(error("OutOfOrderError")) is InterventionError


def test_a_failed_trace_s_error_is_whole_after_a_copy() -> None:
    raised = TraceFailed("late", trace_id="t", status="expired", type="DeadlineExceeded")
    raised.add_note("a note")
    for one in (copy.copy(raised), pickle.loads(pickle.dumps(raised))):
        assert str(one) == "trace t expired: DeadlineExceeded: late"
        assert (one.trace_id, one.status, one.type, one.message) == ("t", "expired", "DeadlineExceeded", "late")
        assert one.__notes__ == ["a note"]
