"""How much a host has to do."""

from __future__ import annotations

from tracewire_engine.worker.block_host.host_load import FULL, FULL_OF_WRITERS, HostLoad


def test_a_host_is_full_of_values_that_are_read_and_of_traces_that_may_write() -> None:
    load = HostLoad()
    assert load.of(0, 0) == 0
    assert load.of(FULL, 0) == load.of(0, FULL_OF_WRITERS) == load.of(FULL // 2, FULL_OF_WRITERS // 2) == 1


def test_blocks_that_take_long_count_more() -> None:
    load = HostLoad()
    for _ in range(100):
        load.measured(5_000, 8)
    slow = load.of(0, 8)
    assert slow > 4 * HostLoad().of(0, 8)
    assert HostLoad(load).of(0, 8) == slow
    for _ in range(100):
        load.measured(200, 8)
    assert load.of(0, 8) < 1.01 * HostLoad().of(0, 8)


def test_one_slow_step_changes_little() -> None:
    load = HostLoad()
    load.measured(2_000, 8)
    assert load.of(8, 0) < 1.5 * HostLoad().of(8, 0)


def test_what_a_host_says_changes_the_load_within_bounds() -> None:
    load = HostLoad()
    for _ in range(1000):
        load.measured(10**9, 1)
        load.measured(10**9, 0)
    assert load.of(1, 0) <= 100 / FULL
    for _ in range(1000):
        load.measured(1, 1)
    assert load.of(1, 0) >= 1 / FULL
