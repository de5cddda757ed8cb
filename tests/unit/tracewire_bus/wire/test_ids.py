"""Ids of events: in the order of attempts and events, and a final after all of them."""

from __future__ import annotations

import pytest

from tracewire_bus.wire.ids import FINAL_ID, event_id, is_encodable, parse_id


def test_ids_are_in_the_order_of_attempts_and_events() -> None:
    ids = [event_id(1, 0), event_id(1, 9), event_id(1, 10), event_id(2, 0), event_id(2, 1, final=True)]
    assert ids[-1] == FINAL_ID
    assert [parse_id(one) for one in ids] == sorted(parse_id(one) for one in ids)
    assert parse_id(event_id(3, 7)) == (3, 7)


@pytest.mark.parametrize(("attempt", "seq"), [(0, 0), (1, -1), (2**64 - 1, 0)])
def test_there_is_no_event_of_such_numbers(attempt: int, seq: int) -> None:
    with pytest.raises(ValueError, match="attempts count from 1"):
        event_id(attempt, seq)


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "a-b", "1-2-3", "\u0661-1", f"{2**64}-0"])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match="event id"):
        parse_id(text)


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    assert is_encodable("naïve \N{GRINNING FACE}")
    assert not is_encodable("\ud800")
