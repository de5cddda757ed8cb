"""A step that is like the one before, as a host is told of it."""

from __future__ import annotations

from tracewire_engine.block_host.told_steps import ToldSteps
from tracewire_engine.protocol.block_host import Arrived, Began, Ended, Event, Reached, Repeated, Shape, Shared, Steered

FIRST = Reached("a", Shared([0, 0], [Shape("float32", (2,), 128), Shape("int8", (2,), 192)]), b"\x01\x00")
SECOND = Reached("b", Shared([0, 0], [Shape("float32", (2,), 256)]), b"", by_request=True)
STEP: list[Event] = [Began([Arrived("r", {})], [("r", 1, 4), ("s", 1, 7)]), FIRST, SECOND, Ended(b"\x02\x00")]


def test_a_repeated_step_has_the_next_tokens_and_rows_elsewhere() -> None:
    told = ToldSteps()
    assert list(told.events([*STEP, Steered(b"")])) == [*STEP, Steered(b"")]
    for token, start in ((5, 1024), (6, 64)):
        begun, first, second, ended = told.events([Repeated(start)])
        assert begun == Began([], [("r", 1, token), ("s", 1, token + 3)])
        assert isinstance(first, Reached)
        assert isinstance(second, Reached)
        assert [shape.start for shape in first.value.tensors] == [start, start + 64]
        assert [shape.start for shape in second.value.tensors] == [start + 128]
        assert (first.location, first.passed, first.by_request) == ("a", b"\x01\x00", False)
        assert (second.location, second.value.skeleton, second.by_request) == ("b", [0, 0], True)
        assert ended == STEP[-1]


def test_the_last_whole_step_is_repeated_in_whatever_turns_it_was_told() -> None:
    told = ToldSteps()
    for event in STEP:
        assert list(told.events([event])) == [event]
    # One that has only begun is none.
    list(told.events([Began([], [("s", 1, 8)])]))
    assert next(told.events([Repeated(0)])) == Began([], [("r", 1, 5), ("s", 1, 8)])


def test_a_step_without_rows_is_repeated() -> None:
    told = ToldSteps()
    list(told.events([Began([], [("r", 1, 0)]), Ended(b"\x07\x00")]))
    assert list(told.events([Repeated(99)])) == [Began([], [("r", 1, 1)]), Ended(b"\x07\x00")]
