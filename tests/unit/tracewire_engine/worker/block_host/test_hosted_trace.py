"""What a worker keeps of a trace whose blocks run in a host."""

from __future__ import annotations

from typing import Any

from tracewire_engine.link.shared_rows import RowMemory
from tracewire_engine.protocol.block_host import Reply, Wait
from tracewire_engine.worker.block_host.hosted_trace import HostedTrace


class Host:
    def __init__(self) -> None:
        self.given = RowMemory.create(1 << 16)
        self.sent: list[bytes] = []
        self.calls = self

    def send(self, message: bytes) -> None:
        self.sent.append(message)


def trace(reads: frozenset[str] | None = None) -> HostedTrace:
    host: Any = Host()
    return HostedTrace("t", host, reads, 1)


def test_the_model_waits_at_the_visit_that_a_block_asks_for() -> None:
    one = trace()
    one.take(Reply(waits=[Wait("a", 0), Wait("b", 2)], observed=["c"]))
    assert one.wanted == {"a", "b", "c"}
    assert [one.passes("b") for _ in range(3)] == [False, False, True]
    assert one.passes("a")
    assert not one.passes("c")


def test_one_block_that_may_write_makes_the_model_wait() -> None:
    one = trace(frozenset({"a"}))
    one.join(frozenset({"b"}))
    assert one.reads == {"a", "b"}
    assert one.wanted == {"a", "b"}
    one.join(None)
    assert one.reads is None


def test_a_host_owes_the_turns_that_it_has_not_taken() -> None:
    one = trace()
    assert not one.owes(0.0)
    one.send([], waits=False)
    one.send([], waits=False)
    assert one.owes(0.0)
    assert not one.owes(60.0)
    one.took(1, 0)
    assert one.owes(0.0)
    # What a host claims beyond what it was sent counts for nothing.
    one.took(7, 1 << 20)
    assert one.owes(0.0)
    assert one.host.given.returned == 0
    one.took(2, 0)
    assert not one.owes(0.0)
