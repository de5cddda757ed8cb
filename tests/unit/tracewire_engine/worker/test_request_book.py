"""Which rows of a step belong to which block, without an engine: blocks come, sit steps out, go on and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import greenlet
from nnsight.intervention.interleaver import Event

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.blocks.request import Request
from tracewire_engine.worker.request_book import RequestBook, end_waiting, token_index


class Mediator(SimpleNamespace):
    """A block that parks, ends or fails when the test says so."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(
            worker=None, alive=False, exception=None, caches=[], batch_group=None, row=-1, counts_at_start={}, **fields
        )

    def __hash__(self) -> int:
        return id(self)

    def start(self, interleaver: Any) -> None:
        self.worker, self.alive, self.counts_at_start = object(), True, dict(interleaver.counts)

    def saved(self) -> dict[str, Any]:
        return {"row": self.row}


class Model:
    def __init__(self) -> None:
        self.interleaver = SimpleNamespace(counts={}, batcher=SimpleNamespace(total=0), mediators=[], reindexed=0)
        self.interleaver.reindex = lambda: setattr(self.interleaver, "reindexed", self.interleaver.reindexed + 1)


def _book(*names: str) -> RequestBook:
    book = RequestBook()
    for name in names:
        book.requests[name] = request = Request(name)
        request.mediator = Mediator()
    return book


def test_each_block_gets_its_request_s_tokens_and_then_its_row() -> None:
    book, model = _book("a", "b"), Model()
    book.scope(model, [("plain", 3), ("b", 2), ("a", 4)])
    a, b = (book.requests[name].mediator for name in "ab")
    assert (a.batch_group, b.batch_group) == ([5, 4], [3, 2])
    assert model.interleaver.batcher.total == 9
    assert model.interleaver.mediators == [b, a]
    assert model.interleaver.reindexed == 1
    book.unflatten(model)
    assert (a.batch_group, b.batch_group) == ([2, 1], [1, 1])
    assert model.interleaver.batcher.total == 3
    book.record_saves()
    assert (a.found, b.found) == ({"row": 2}, {"row": 1})


def test_edits_are_served_before_the_request_s_own_block() -> None:
    book, model = _book("a"), Model()
    request = book.requests["a"]
    request.copies["edit"] = edit = Mediator()
    book.scope(model, [("a", 1)])
    assert model.interleaver.mediators == [edit, request.mediator]


def test_steps_that_a_request_sits_out_are_not_counted_as_its_own() -> None:
    book, model = _book("a"), Model()
    counts, block = model.interleaver.counts, book.requests["a"].mediator
    book.scope(model, [("a", 1)])
    counts["here"] = 1
    for passed in (2, 3):
        book.scope(model, [("other", 1)])
        assert block.batch_group is None
        counts["here"] = passed
    book.scope(model, [("a", 1)])
    # Of the three visits, the first was in a step of its own.
    assert counts["here"] - block.counts_at_start["here"] == 1


def test_a_block_that_has_ended_is_left_out_unless_its_caches_go_on() -> None:
    book, model = _book("ended", "caching"), Model()
    spans = [("ended", 1), ("caching", 1)]
    book.scope(model, spans)
    for name in ("ended", "caching"):
        book.requests[name].mediator.alive = False
    caching = book.requests["caching"].mediator
    caching.caches.append(object())
    book.scope(model, spans)
    assert model.interleaver.mediators == [caching]
    assert book.requests["ended"].mediator.batch_group is None


def test_an_error_before_the_first_location_ends_the_block_alone() -> None:
    book, model = _book("a", "b"), Model()

    def fails(interleaver: Any) -> None:
        raise ValueError("at the top")

    book.requests["a"].mediator.start = fails
    book.scope(model, [("a", 1), ("b", 1)])
    assert str(book.requests["a"].mediator.exception) == "at the top"
    assert book.requests["b"].mediator.alive


@pytest.mark.parametrize(("computed", "refused"), [(0, True), (3, True), (6, False), (12, False)])
def test_a_prompt_of_which_a_step_computes_a_part_is_refused_to_its_blocks(computed: int, refused: bool) -> None:
    book = _book("a")
    request = book.requests["a"]
    request.copies["edit"] = object()
    states = {"a": SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=10)}
    book.refuse_cut({"a": 4}, states)
    assert (request.mediator is None, not request.copies, request.error is not None) == (refused,) * 3
    if request.error is not None:
        assert "4 tokens of the prompt's 10" in request.error.message


def test_a_request_in_no_step_is_not_refused() -> None:
    book = _book("a")
    book.refuse_cut({"b": 4}, {})
    assert book.requests["a"].error is None


def _waiting(iteration: int | None, raised: Exception | None = None) -> Any:
    """A block that waits for a location, at the first step or in a loop over steps; it may raise on its way out."""
    main = greenlet.getcurrent()

    def block() -> None:
        try:
            main.switch()
        finally:
            if raised is not None:
                raise raised

    worker = greenlet(block)
    worker.switch()
    pending = SimpleNamespace(event=Event.VALUE, provider="model.layers.0.output")
    return SimpleNamespace(alive=True, worker=worker, pending=pending, iteration=iteration, waited_in_vain=False)


def test_a_loop_over_steps_ends_with_its_request_and_another_wait_is_an_error() -> None:
    for iteration, raised, wrong in ((0, None, True), (3, None, False), (3, KeyError("on the way out"), True)):
        block = _waiting(iteration, raised)
        end_waiting(block)
        assert block.worker.dead
        assert block.waited_in_vain is wrong


def test_a_block_that_has_ended_is_not_ended_again() -> None:
    for block in (SimpleNamespace(alive=False), SimpleNamespace(alive=True, pending=None)):
        end_waiting(block)  # type: ignore[arg-type]


def test_a_step_samples_a_token_behind_all_that_it_computes() -> None:
    def index(computed: int, tokens: int) -> int:
        return token_index(SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=9), tokens)

    # A prompt in two chunks, then the tokens behind the first.
    assert [index(0, 4), index(4, 5), index(9, 1), index(10, 1)] == [-5, 0, 1, 2]
