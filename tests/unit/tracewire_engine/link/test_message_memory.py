"""Memory through which messages go from one process to another."""

from __future__ import annotations

import os

import pytest

from tracewire_engine.link.message_memory import MessageMemory, Placed
from tracewire_engine.link.shared_rows import SharedValueError

SIZE = 1 << 16


def shared() -> tuple[MessageMemory, MessageMemory]:
    ours = MessageMemory.create(SIZE)
    return ours, MessageMemory(os.dup(ours.descriptor), SIZE)


def test_the_writer_gets_room_back_that_the_reader_has_taken() -> None:
    writer, reader = shared()
    messages = [os.urandom(size) for size in (20_000, 20_000, 20_000)]
    placed = [writer.place(message) for message in messages]
    assert writer.place(messages[0]) is None
    for message, place in zip(messages, placed, strict=True):
        assert place is not None
        assert reader.take(place) == message
        again = writer.place(message)
        assert again is not None
        assert again.start == place.start


def test_all_but_the_last_bytes_can_be_used() -> None:
    writer, reader = shared()
    message = os.urandom(SIZE - 64)
    placed = writer.place(message)
    assert placed is not None
    assert reader.take(placed) == message
    assert writer.place(message + b"x") is None


def test_a_count_of_bytes_that_were_never_given_out_frees_no_others() -> None:
    writer, reader = shared()
    assert writer.place(b"x" * 60_000) is not None
    reader.take(Placed(0, 1, 1 << 40))
    assert writer.place(b"y" * 60_000) is not None
    assert writer.taken == writer.returned + 60_032 == 120_064


def test_a_message_is_taken_once() -> None:
    writer, reader = shared()
    placed = writer.place(b"x" * 1000)
    assert placed is not None
    reader.take(placed)
    with pytest.raises(SharedValueError, match="outside the shared memory"):
        reader.take(placed)


@pytest.mark.parametrize("placed", [Placed(-1, 5, 5), Placed(0, SIZE, 5), Placed(SIZE, 0, 5), Placed(0, 5, -1)])
def test_a_message_outside_the_memory_is_refused(placed: Placed) -> None:
    _, reader = shared()
    with pytest.raises(SharedValueError, match="outside the shared memory"):
        reader.take(placed)
