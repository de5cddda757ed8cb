"""Which traces share a host."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.block_host.host import BlockHost, HostedTrace
from tracewire_engine.worker.block_host.host_load import FULL, FULL_OF_WRITERS
from tracewire_engine.worker.block_host.reading import MOST_VISITED, Account
from tracewire_engine.worker.block_host.tenant_hosts import TenantHosts

READS, WRITES, ODD = Account(frozenset({"a"}), computes=True), Account(None, computes=True), Account()


class Process:
    dead, large, closed = False, 0, False

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.closed = True


class Beside:
    """In place of the pool and of the thread of reports."""

    def take(self) -> Process:
        return Process()

    def watch(self, host: BlockHost) -> None:
        pass


def hosts(most: int = 2) -> tuple[TenantHosts, Beside]:
    beside = Beside()
    anything: Any = beside
    return TenantHosts(anything, anything, most), beside


def take(found: TenantHosts, tenant: str | None, account: Account, name: str) -> BlockHost:
    host = found.of(tenant, account)
    assert host.add(HostedTrace(name, host, 1))
    return host


def test_blocks_that_only_compute_share_a_host_with_their_kind_and_tenant() -> None:
    found, _ = hosts()
    taken = [
        take(found, tenant, account, f"{tenant}{account}{number}")
        for tenant in ("", "t")
        for account in (READS, WRITES)
        for number in range(3)
    ]
    assert len({id(host) for host in taken}) == 4
    assert all(len(host.traces) == 3 for host in taken)
    odd = [take(found, "t", ODD, "x"), take(found, "t", ODD, "y"), take(found, None, READS, "z")]
    assert len({id(host) for host in (*odd, *taken)}) == 7
    assert [host.kind for host in odd] == [None, None, None]


def test_blocks_for_which_a_stream_waits_have_hosts_of_their_own() -> None:
    edits = Account(None, computes=True, edits=frozenset({"a"}))
    beside: Any = Beside()
    found = TenantHosts(beside, beside, 2, visits=True)
    taken = [take(found, "t", account, str(number)) for number, account in enumerate((edits, WRITES, READS, edits))]
    assert taken[0] is taken[3]
    assert len({id(host) for host in taken}) == 3
    # A later request of a trace has another block.
    taken[0].account = Account(None, computes=True)
    assert take(found, "t", edits, "next") is not taken[0]
    # A host whose blocks have many locations takes no others.
    many = Account(None, computes=True, edits=frozenset(map(str, range(MOST_VISITED))))
    first = take(found, "u", many, "0")
    first.account = many
    assert take(found, "u", many, "1") is first
    assert take(found, "u", edits, "2") is not first
    found, _ = hosts()
    assert take(found, "t", edits, "x") is take(found, "t", WRITES, "y")


def test_a_host_in_which_a_block_of_another_kind_has_run_takes_no_trace() -> None:
    """It may have hung a network into the model's tree."""
    found, _ = hosts()
    first = take(found, "t", WRITES, "first")
    first.account = Account()
    assert take(found, "t", WRITES, "next") is not first


def fill(found: TenantHosts, reads: frozenset[str] | None, used_us: int, traces: int) -> list[int]:
    """How many traces each of a tenant's hosts has in the end, if a step of a host takes so long for each trace."""
    counts: dict[int, int] = {}
    for number in range(traces):
        host = take(found, "t", Account(reads, computes=True), str(number))
        host.accounts.replace(None, Account(reads, computes=True))
        host.reads = reads
        counts[id(host)] = len(host.traces)
        for _ in range(50):
            host.worked(used_us * len(host.traces))
    return list(counts.values())


def test_a_tenant_with_many_traces_has_more_hosts_up_to_a_limit() -> None:
    found, _ = hosts(most=2)
    assert fill(found, frozenset({"a"}), 10, 4 * FULL) == [2 * FULL, 2 * FULL]


@pytest.mark.parametrize(
    ("reads", "size"), [(frozenset("a"), FULL), (frozenset("abcd"), FULL // 4), (None, FULL_OF_WRITERS)]
)
def test_a_host_is_full_by_what_its_blocks_do_in_a_step(reads: frozenset[str] | None, size: int) -> None:
    found, _ = hosts(most=9)
    assert fill(found, reads, 10, 3 * size) == [size] * 3


def test_the_traces_that_come_after_a_peak_share_few_hosts() -> None:
    """Each host costs the model's thread messages in a step."""
    found, _ = hosts(most=4)

    def opened(name: str) -> BlockHost:
        host = take(found, "t", READS, name)
        host.traces[name].account = READS
        host.accounts.replace(None, READS)
        return host

    peak = [opened(str(number)) for number in range(4 * FULL)]
    assert len(set(peak)) == 4
    left = {number: host for number, host in enumerate(peak) if host is peak[-1] and number % 2}
    for number, host in enumerate(peak):
        if number not in left:
            host.drop(host.traces[str(number)])
    # The fullest one with room is filled first.
    later = [opened(f"later{number}") for number in range(FULL)]
    assert later[: FULL - len(left)] == [peak[-1]] * (FULL - len(left))
    assert len(set(later)) == 2


@pytest.mark.parametrize("reads", [frozenset("a"), frozenset("abcd"), None])
def test_a_host_has_fewer_traces_if_their_blocks_take_long(reads: frozenset[str] | None) -> None:
    found, _ = hosts(most=99)
    sizes = fill(found, reads, 3_000, 30)
    # The first host is slow before it is measured. The next ones are taken to be like it.
    assert max(sizes[1:]) <= 3


def test_a_host_that_is_of_no_use_takes_no_trace() -> None:
    found, _ = hosts()
    lost = take(found, "t", READS, "1")
    lost.failure = Failure(type="BlockHostLost", message="")
    dead = take(found, "t", READS, "2")
    process: Any = dead.process
    process.dead = True
    mixed = take(found, "t", READS, "3")
    mixed.reads = None
    assert len({id(one) for one in (lost, dead, mixed, take(found, "t", READS, "4"))}) == 4


def test_a_host_that_is_retired_is_forgotten() -> None:
    found, _ = hosts()
    first = take(found, "t", READS, "1")
    first.drop(first.traces["1"])
    assert take(found, "t", READS, "2") is first
    first.drop(first.traces["2"])
    assert first.retire()
    assert take(found, "u", READS, "3") is not first
    assert take(found, "t", READS, "4") is not first
    assert first not in [host for known in found._shared.values() for host in known]


def test_a_host_whose_saves_nothing_takes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, beside = hosts()
    process = Process()

    def refuse(_: BlockHost) -> None:
        raise OSError("no relay")

    monkeypatch.setattr(beside, "take", lambda: process)
    monkeypatch.setattr(beside, "watch", refuse)
    with pytest.raises(OSError, match="no relay"):
        found.of("t", READS)
    assert process.closed
