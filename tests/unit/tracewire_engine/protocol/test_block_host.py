"""The messages between a worker and its hosts can be told apart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tracewire_engine.protocol.block_host import (
    Began,
    Broken,
    Chunk,
    Ended,
    Event,
    Finished,
    Generated,
    Reached,
    Ready,
    Reply,
    Report,
    Reported,
    Request,
    Shared,
    Steered,
    Turn,
)


@pytest.mark.parametrize(
    "event",
    [
        *(Began([], [("a", 1, 0)]), Reached("x", Shared(1)), Ended(b"ab")),
        *(Finished("a", 2), Steered(b"c"), Generated(b"d")),
    ],
)
def test_events(event: Event) -> None:
    turn = msgspec.msgpack.decode(msgspec.msgpack.encode(Turn([event], True, ["x"])), type=Turn)
    assert turn == Turn([event], True, ["x"])


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        *((one, Report) for one in (Reported(turns=2), Chunk("a", "b", 0, b"c"), Ready(["x"]), Broken("y"))),
        *((one, Reply | Request) for one in (Reply(begins=True), Request("model.norm", "weight"))),
    ],
)
def test_what_a_host_says(said: Any, kind: Any) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=kind) == said
