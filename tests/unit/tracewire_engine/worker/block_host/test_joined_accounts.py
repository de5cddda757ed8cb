"""The accounts of a host's traces, which come and go, add up to what `union` says of them."""

from __future__ import annotations

import random
from dataclasses import replace

from tracewire_engine.worker.block_host.joined_accounts import JoinedAccounts
from tracewire_engine.worker.block_host.reading import Account, union


def account(number: int) -> Account:
    """One of some accounts, a new object each time."""
    where = frozenset(f"layer{index}" for index in range(number % 3 + 1))
    reads = None if number % 4 == 3 else where
    return Account(
        reads, number % 5 > 0, where, number % 2 > 0, {"layer0": frozenset({number % 2})}, number % 3 > 0, where
    )


def test_they_are_the_union_of_those_that_are_there() -> None:
    chosen = random.Random(3)
    known, present = JoinedAccounts(), list[Account]()
    for _ in range(500):
        if present and chosen.random() < 0.5:
            one = present.pop(chosen.randrange(len(present)))
            known.replace(replace(one), None)
        else:
            present.append(account(chosen.randrange(12)))
            known.replace(None, present[-1])
        assert known.joined == union(present)
        assert known.traces == len(present)
        assert known.writers == sum(one.reads is None for one in present)
        assert known.reads == sum(len(one.reads) for one in present if one.reads is not None)


def test_a_trace_that_asks_for_nothing_counts() -> None:
    known = JoinedAccounts()
    known.replace(None, union([]))
    assert (known.traces, known.reads, known.writers) == (1, 1, 0)


def test_the_same_blocks_are_joined_once() -> None:
    known, same = JoinedAccounts(), account(2)
    known.replace(None, same)
    joined = known.joined
    for _ in range(3):
        known.replace(None, replace(same))
    assert known.joined is joined
    for _ in range(3):
        known.replace(same, None)
    assert known.joined is joined
    known.replace(same, None)
    assert known.joined == union([])


def test_a_further_request_of_a_trace_adds_to_its_account() -> None:
    known = JoinedAccounts()
    known.replace(None, account(0))
    both = union([account(0), account(3)])
    known.replace(account(0), both)
    assert known.joined == both
    assert (known.traces, known.reads, known.writers) == (1, 0, 1)
