"""How much a host has to do."""

from __future__ import annotations

from tracewire_engine.worker.block_host.host_load import FULL, FULL_OF_WRITERS, HostLoad

READS, WRITES = [frozenset({"a"})], [None]


def test_a_host_is_full_of_values_that_are_read_and_of_traces_that_may_write() -> None:
    load = HostLoad()
    assert load.of([]) == 0
    assert (
        load.of(READS * FULL) == load.of([frozenset(map(str, range(FULL)))]) == load.of(WRITES * FULL_OF_WRITERS) == 1
    )


def test_blocks_that_take_long_count_more() -> None:
    load = HostLoad()
    for _ in range(100):
        load.measured(5_000, WRITES * 8)
    slow = load.of(WRITES * 8)
    assert slow > 4 * HostLoad().of(WRITES * 8)
    assert HostLoad(load).of(WRITES * 8) == slow
    for _ in range(100):
        load.measured(200, WRITES * 8)
    assert load.of(WRITES * 8) < 1.01 * HostLoad().of(WRITES * 8)


def test_one_slow_step_changes_little() -> None:
    load = HostLoad()
    load.measured(2_000, READS * 8)
    assert load.of(READS * 8) < 1.5 * HostLoad().of(READS * 8)


def test_what_a_host_says_changes_the_load_within_bounds() -> None:
    load = HostLoad()
    for _ in range(1000):
        load.measured(10**9, READS)
        load.measured(10**9, [])
    assert load.of(READS) <= 100 / FULL
    for _ in range(1000):
        load.measured(1, READS)
    assert load.of(READS) >= 1 / FULL
