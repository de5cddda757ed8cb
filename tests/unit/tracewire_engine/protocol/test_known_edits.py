"""What a block writes travels to its host with the request."""

from __future__ import annotations

import msgspec

from tracewire_engine.protocol.block_host import Arrived, Began, Turn
from tracewire_engine.protocol.known_edits import Edit, Operation

EDIT = Edit(
    "model.model.layers.1.output",
    [
        Operation("getitem", [["r", 0], 0]),
        Operation("to", [["v", 0], ["d", "bfloat16"]]),
        Operation("sum", [["r", 2]], {"dim": -1, "keepdim": True}),
        Operation("setitem", [["r", 1], ["r", 3], ["e"], ["s", None, -1, 2], ["n"]]),
        Operation("imul", [["r", 1], 0.1]),
    ],
    [["vectors", "a", 0], ["scale"]],
    2,
    7,
)


def test_an_arrived_request_brings_its_edits() -> None:
    arrived = Arrived(
        "a", {"block": b"\x80"}, ["saved"], [EDIT, Edit("model.logits", [Operation("zero_", [["r", 0]])])]
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(arrived), type=Arrived) == arrived
    turn = Turn([Began([arrived], [("a", 1, 0)])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(turn), type=Turn) == turn


def test_numbers_come_as_what_they_were() -> None:
    """A flag is no number to torch, and a whole number makes no float of integers."""
    given = [True, 1, 1.0, -0.0]
    edit = Edit("model.logits", [Operation("mul", [["r", 0], *given])])
    (operation,) = msgspec.msgpack.decode(msgspec.msgpack.encode(edit), type=Edit).operations
    assert [repr(one) for one in operation.arguments[1:]] == [repr(one) for one in given]


def test_an_edit_goes_on_to_the_last_step_unless_it_says_otherwise() -> None:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(["model.logits", []]), type=Edit)
    assert (found.leaves, found.first, found.end) == ([], 0, None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["a", {}]), type=Arrived).edits == []
