"""What a worker does behind its answers."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_engine.worker.deferred_report import DeferredReport


def process_of(done: list[Any]) -> type:
    """A class that answers as vLLM's worker processes do."""

    class Process:
        def handle_output(self, output: Any) -> None:
            done.append(output)

    return Process


def test_work_is_done_behind_the_answer() -> None:
    done: list[Any] = []
    deferred, process = DeferredReport(), process_of(done)
    deferred.attach(process)
    one = process()
    deferred.defer(lambda: done.append("at once: nothing has been answered yet"))
    one.handle_output("loaded")
    for step in range(2):
        deferred.defer(lambda step=step: done.append(f"report {step}"))
        one.handle_output(f"answer {step}")
    assert done == ["at once: nothing has been answered yet", "loaded", "answer 0", "report 0", "answer 1", "report 1"]


def test_work_is_done_once_and_before_what_follows() -> None:
    done: list[Any] = []
    deferred, process = DeferredReport(), process_of(done)
    deferred.attach(process)
    one = process()
    one.handle_output("loaded")
    deferred.defer(lambda: done.append("first"))
    deferred.defer(lambda: done.append("second"))
    deferred.run()
    deferred.run()
    one.handle_output("answer")
    assert done == ["loaded", "first", "second", "answer"]


def test_a_failure_is_the_next_calls() -> None:
    def fail() -> None:
        raise ValueError("no report")

    done: list[Any] = []
    deferred, process = DeferredReport(), process_of(done)
    deferred.attach(process)
    one = process()
    one.handle_output("loaded")
    deferred.defer(fail)
    one.handle_output("answer")
    assert done == ["loaded", "answer"], "one answer to each call"
    with pytest.raises(ValueError, match="no report"):
        deferred.run()
    deferred.run()
