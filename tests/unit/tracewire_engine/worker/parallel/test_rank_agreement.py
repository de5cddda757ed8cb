"""What tensor-parallel ranks tell each other of blocks, without an engine: two ends, each on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import Pair
from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.parallel import rank_agreement as module
from tracewire_engine.worker.parallel.rank_agreement import BlockKey, Ranks

pytest.importorskip("vllm")


ONE, TWO = BlockKey("request 1", ""), BlockKey("request 2", "")


@pytest.fixture
def pair(tmp_path: Any) -> Pair:
    return Pair(f"ipc://{tmp_path}/link")


def failure() -> Failure:
    return Failure(type="BlockTimeout", message="too slow", line=7)


def at(what: str, *keys: BlockKey) -> Callable[[Ranks], set[BlockKey]]:
    return lambda ranks: ranks.agree(what, keys)


def test_what_all_ask_for_is_done(pair: Pair) -> None:
    assert pair.both(at("a", ONE, TWO), at("a", TWO, ONE)) == [{ONE, TWO}] * 2
    assert pair.both(at("b", ONE), at("b", ONE)) == [{ONE}] * 2
    # Nobody asks: nothing is sent.
    assert pair.ends[0].agree("c", []) == set()


def test_who_has_failed_elsewhere_is_not_waited_for(pair: Pair) -> None:
    first, second = pair.ends
    first.fail(ONE, failure)
    first.fail(ONE, failure)
    assert second.agree("a", [ONE]) == set()
    error = str(second.difference(ONE))
    assert "rank 0 of 2" in error
    assert "BlockTimeout: too slow (line 7)" in error
    # What the second rank had said of it is not taken for an answer to anything else.
    assert pair.both(at("b", TWO), at("b", TWO)) == [{TWO}] * 2


def test_what_one_rank_leaves_out_all_leave_out(pair: Pair) -> None:
    pair.ends[1].fail(TWO, failure)
    assert pair.both(at("a", ONE, TWO), at("a", ONE)) == [{ONE}] * 2
    assert pair.both(at("b", ONE), at("b", ONE)) == [{ONE}] * 2


def test_ranks_at_different_places_leave_both_out(pair: Pair) -> None:
    assert pair.both(at("a", ONE), at("b", ONE)) == [set(), set()]
    assert pair.both(at("c", TWO), at("c", TWO)) == [{TWO}] * 2


def test_who_never_comes_is_not_waited_for_without_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_S", 0.01)
    pair = Pair(f"ipc://{tmp_path}/link", 0.01)
    assert pair.ends[1].agree("a", [ONE]) == set()
    # The other hears of it with the next step.
    for end in pair.ends:
        end.begin()
    pair.ends[0]._receive(5000)
    pair.ends[0].begin()
    assert [key for key, *_ in pair.ends[0].differing()] == [ONE]


@pytest.mark.parametrize(
    ("theirs", "ours", "parts"),
    [
        ({}, {}, False),
        ({ONE: "ended"}, {ONE: "ended"}, False),
        ({ONE: "failed"}, {ONE: "failed"}, False),
        ({ONE: "ended"}, {}, True),
        ({}, {ONE: "ended"}, True),
        ({ONE: "stopped"}, {ONE: "ended"}, True),
        # Its own failure is what the first rank reports.
        ({}, {ONE: "failed"}, False),
    ],
)
def test_a_step_is_compared(pair: Pair, theirs: dict[BlockKey, str], ours: dict[BlockKey, str], parts: bool) -> None:
    pair.both(lambda ranks: ranks.compare_ended(ours), lambda ranks: ranks.send_ended(theirs))
    assert [key for key, *_ in pair.ends[0].differing()] == ([ONE] if parts else [])


def test_all_ranks_get_the_greatest_number_of_a_step(pair: Pair) -> None:
    for mine, theirs in ((1, 3), (2, 0), (0, 0)):
        # The first rank may be done with its step long before the other one begins.
        found = pair.both(lambda ranks, one=mine: ranks.greatest(one), lambda ranks, one=theirs: ranks.greatest(one))  # type: ignore[misc]
        assert found == [max(mine, theirs)] * 2
        for end in pair.ends:
            end.begin()


def test_what_fails_before_the_numbers_is_heard_of_behind_them(pair: Pair) -> None:
    first, second = pair.ends
    first.fail(ONE, failure)
    assert pair.both(lambda ranks: ranks.greatest(0), lambda ranks: ranks.greatest(3)) == [3, 3]
    assert [key for key, *_ in second.differing()] == [ONE]


def test_a_rank_that_waits_at_an_operation_is_let_go_by_the_numbers(pair: Pair) -> None:
    def waits(ranks: Ranks) -> Any:
        return ranks.agree("a", [ONE]), ranks.greatest(1)

    assert pair.both(lambda ranks: ranks.greatest(2), waits) == [2, (set(), 2)]


def test_the_first_rank_lets_go_of_who_waits_for_it(pair: Pair) -> None:
    def waits(ranks: Ranks) -> set[BlockKey]:
        found = ranks.agree("a", [ONE])
        ranks.send_ended({})
        return found

    assert pair.both(lambda ranks: ranks.compare_ended({}), waits) == [None, set()]
    # Both know: the second by what it was told, the first since it told it.
    assert ONE in pair.ends[0]._announced


def test_what_is_over_is_forgotten(pair: Pair) -> None:
    first, second = pair.ends
    first.fail(ONE, failure)
    assert second.agree("a", [ONE]) == set()
    for end in pair.ends:
        end.forget(ONE.request)
        end.forget(TWO.request)
        assert not end.requests
        assert not end._announced
        assert not end._elsewhere
    # Of a request that is over nothing is told, nor noted.
    first.fail(ONE, failure)
    second.begin()
    assert second.differing() == []
