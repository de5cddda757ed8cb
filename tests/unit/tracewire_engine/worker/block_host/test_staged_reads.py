"""What a step has reached is kept until the hosts are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tracewire_engine.worker.block_host import staged_reads
from tracewire_engine.worker.block_host.rows import StepRows
from tracewire_engine.worker.block_host.staged_reads import StagedReads


class Host:
    """A host as far as it matters here."""

    def __init__(self, name: str, rows: StepRows | None, reads: frozenset[str] | None) -> None:
        self.name, self.rows, self.reads = name, rows, reads
        self.account = SimpleNamespace(parts={})
        self.failure: Exception | None = None
        #: Whether something is left to send after it was told.
        self.late = True


class Step:
    """Notes what it is given, each value of 40 bytes."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, list[str], int]] = []
        self.size, self.left = 0, False

    def reach(self, location: str, value: Any, hosts: Sequence[Any], passed: int, **how: Any) -> None:
        if value is None:
            raise ValueError("no such value")
        self.reached.append((location, [host.name for host in hosts], passed))
        self.how = how
        self.size += 40

    def leave(self) -> None:
        self.left = True


class Turns:
    """Notes what hosts are told."""

    def __init__(self) -> None:
        self.passed = [0, 1, 2]
        self.steps: list[Step] = []
        self.staged: list[tuple[list[str], int]] = []
        self.given: list[tuple[list[str], Step]] = []
        self.sent: list[str] = []
        self.failed: list[tuple[str, str, str]] = []

    def stage(self, rows: dict[Any, StepRows], *, pinned: bool, expected: int) -> Step:
        self.staged.append(([host.name for host in rows], expected))
        self.steps.append(Step())
        return self.steps[-1]

    def give(self, readers: list[Any], step: Step, *, whole: bool) -> None:
        assert whole
        assert not step.left
        self.given.append(([host.name for host in readers], step))

    def send(self, host: Any) -> bool:
        self.sent.append(host.name)
        return bool(host.late)

    def misshared(self, host: Any, location: str, error: Exception) -> None:
        host.failure = error
        self.failed.append((host.name, location, str(error)))


class Staged:
    """Two hosts that only read, one that waits, and one without rows in the step."""

    def __init__(self) -> None:
        rows, reads = StepRows([(0, 1)], [0], 3, 3), frozenset({"at.0"})
        self.hosts: list[Any] = [
            *(Host("a", rows, reads), Host("b", rows, reads), Host("waits", rows, None), Host("idle", None, reads)),
        ]
        self.turns = Turns()
        #: The hosts to which what is late was sent at once.
        self.now: list[str] = []
        turns: Any = self.turns
        reports: Any = SimpleNamespace(send_now=lambda hosts: self.now.extend(host.name for host in hosts))
        self.reads = StagedReads(turns, reports, pinned=False)

    def reach(self, location: str, value: Any, *, by_request: bool = False) -> None:
        self.reads.reach(location, value, self.hosts[:2], self.hosts, by_request=by_request)


def test_hosts_are_told_of_a_whole_step_once() -> None:
    staged = Staged()
    staged.reach("at.0", torch.zeros(3))
    staged.turns.passed.append(3)
    staged.reach("at.1", torch.zeros(3), by_request=True)
    assert not staged.turns.given
    assert staged.turns.staged == [(["a", "b"], 0)]
    staged.reads.give(staged.hosts)
    (step,) = staged.turns.steps
    assert step.reached == [("at.0", ["a", "b"], 3), ("at.1", ["a", "b"], 4)]
    assert step.how == {"by_request": True, "rows_only": False, "parts": None}
    assert staged.turns.given == [(["a", "b", "idle"], step)]
    assert step.left
    # Nobody waits until the hosts can have it.
    assert not staged.turns.sent
    staged.reads.give(staged.hosts)
    assert len(staged.turns.given) == 1


def test_the_next_step_is_as_large_as_the_last_one() -> None:
    staged = Staged()
    for _ in range(2):
        staged.reach("at.0", torch.zeros(3))
        staged.reach("at.1", torch.zeros(3))
        staged.reads.give(staged.hosts)
    assert [expected for _, expected in staged.turns.staged] == [0, 80]
    assert staged.reads.expected == 80


def test_hosts_have_what_is_much_within_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "_MOST_STAGED", 80)
    staged = Staged()
    staged.hosts[1].late = False
    for place in range(5):
        staged.reach(f"at.{place}", torch.zeros(3))
    first, second = staged.turns.steps
    assert [len(step.reached) for step in (first, second)] == [3, 2]
    assert staged.turns.given == [(["a", "b", "idle"], first)]
    assert staged.turns.sent == ["a", "b", "idle"]
    # What has not been sent is sent at once.
    assert staged.now == ["a", "idle"]


def test_a_step_that_was_not_ended_is_forgotten() -> None:
    staged = Staged()
    staged.reads.drop()
    staged.reach("at.0", torch.zeros(3))
    staged.reads.drop()
    assert staged.turns.steps[0].left
    staged.reads.give(staged.hosts)
    assert not staged.turns.given
    staged.reach("at.0", torch.zeros(3))
    assert len(staged.turns.steps) == 2


def test_a_value_that_cannot_be_staged_costs_its_readers_and_nothing_else() -> None:
    staged = Staged()
    staged.reach("at.0", torch.zeros(3))
    staged.reads.reach("at.1", None, staged.hosts[1:2], staged.hosts, by_request=False)
    staged.reach("at.2", torch.zeros(3))
    assert staged.turns.failed == [("b", "at.1", "no such value")]
    assert [location for location, *_ in staged.turns.steps[0].reached] == ["at.0", "at.2"]


def test_a_host_that_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "_MOST_STAGED", 39)
    staged = Staged()
    staged.hosts[0].failure = ValueError()
    staged.reach("at.0", torch.zeros(3))
    assert staged.turns.sent == ["b", "idle"]


def test_inside_a_module_all_that_is_read_is_rows() -> None:
    staged = Staged()
    staged.reach("model.model.layers.0.mlp.source.add_0.output", torch.zeros(3))
    assert staged.turns.steps[0].how["rows_only"]
