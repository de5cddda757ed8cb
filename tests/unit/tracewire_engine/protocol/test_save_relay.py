"""What a worker and its save relay say to each other."""

from __future__ import annotations

import msgspec
import pytest

from tracewire_engine.protocol.save_relay import (
    RELAYED,
    Closed,
    Expected,
    Lost,
    Opened,
    Order,
    Over,
    Passed,
    Refused,
    Relayed,
    Settings,
)

#: How long a request's name is at most, with much to spare.
NAME = "x" * 400


@pytest.mark.parametrize(
    "order",
    [
        Settings("ipc:///a", 3),
        Opened(1),
        Expected(1, [(NAME, 0)] * RELAYED),
        Over(1, [(NAME, 0)] * RELAYED),
        Lost(1, trusted=False),
        Closed(1),
    ],
)
def test_orders_travel_and_fit_into_a_message(order: Order) -> None:
    encoded = msgspec.msgpack.encode(order)
    assert len(encoded) < 1 << 16
    assert msgspec.msgpack.decode(encoded, type=Order) == order


@pytest.mark.parametrize(
    "said", [Passed(1, [Relayed(NAME, 0, 1 << 31, 1 << 31, ended=True)] * RELAYED, last=False), Refused(1, "why")]
)
def test_answers_travel_and_fit_into_a_message(said: Passed | Refused) -> None:
    encoded = msgspec.msgpack.encode(said)
    assert len(encoded) < 1 << 16
    assert msgspec.msgpack.decode(encoded, type=Passed | Refused) == said
