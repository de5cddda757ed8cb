"""The edit of a location grows with each operation of a block, and keeps those that matter."""

from __future__ import annotations

from typing import Any

import pytest

from tracewire_engine.protocol.known_edits import Edit, Operation
from tracewire_engine.worker.block_host import edit_symbols
from tracewire_engine.worker.block_host.edit_symbols import (
    OTHER,
    OWN,
    STEP,
    Constant,
    Dtype,
    Growing,
    Leaf,
    Module,
    Name,
    Number,
    Numbers,
    Register,
    Stream,
    Unclear,
    encoded,
    is_known,
)

ALL: list[Any] = ["s", None, None, None]


def growing(*operations: tuple[Any, ...]) -> Growing:
    made = Growing("model.logits", 0, None)
    for operation in operations:
        made.emit(*operation)
    return made


def test_operations_that_do_not_matter_are_left_out_and_the_others_renumbered() -> None:
    made = growing(
        ("getitem", [["r", 0], ALL]),
        ("clone", [["r", 1]]),
        ("mul", [["r", 1], 2.0]),
        ("abs", [["r", 2]]),
        ("setitem", [["r", 1], ["r", 3], ALL], {"other": ["r", 3]}),
        ("float", [["r", 5]]),
    )
    made.effects.append(5)
    made.leaves.append(["vector"])
    made.first, made.end = 2, 4
    assert made.done() == Edit(
        "model.logits",
        [
            Operation("getitem", [["r", 0], ALL]),
            Operation("mul", [["r", 1], 2.0]),
            Operation("setitem", [["r", 1], ["r", 2], ALL], {"other": ["r", 2]}),
        ],
        [["vector"]],
        2,
        4,
    )


def test_an_operation_that_only_an_option_names_matters() -> None:
    made = growing(("neg", [2.0]), ("clamp_", [["r", 0]], {"min": ["r", 1]}))
    made.effects.append(2)
    assert [one.name for one in made.done().operations] == ["neg", "clamp_"]


@pytest.mark.parametrize(
    "operation",
    [
        ("mean", [["r", 0]], {"dim": 7}),
        ("matmul", [["r", 0], ["r", 0]]),
        ("getitem", [["r", 0], 3]),
        ("getitem", [["r", 0], ALL, 7]),
        ("getitem", [["r", 0], ["s", None, None, 0]]),
        ("getitem", [["v", 0], 0]),
        ("mul", [["r", 0], ["v", 0]]),
        ("clamp", [["r", 0]], {"min": 1}),
        ("unsqueeze", [["r", 0], 9]),
        ("type_as", [["r", 0], ["v", 0]]),
        ("copy_", [["r", 0], ["v", 0]]),
        ("norm", [["r", 0], 2]),
    ],
)
def test_one_that_may_raise_an_error_makes_it_unclear_unless_it_matters(operation: Any) -> None:
    beside = growing(("zero_", [["r", 0]]), operation)
    beside.effects.append(1)
    with pytest.raises(Unclear):
        beside.done()
    used = growing(operation, ("setitem", [["r", 0], ["r", 1], ALL]))
    used.effects.append(2)
    assert len(used.done().operations) == 2


@pytest.mark.parametrize(
    "operation",
    [
        ("mul", [["r", 0], 2.0]),
        ("iadd", [["r", 0], 1]),
        ("norm", [["r", 0]]),
        ("clone", [["r", 0]]),
        ("getitem", [["r", 0], -1]),
        ("getitem", [["r", 0], ["s", 1, None, 1]]),
        ("getitem", [["r", 0], ["e"]]),
        ("attribute", [["r", 0], "dtype"]),
        ("stream", [["r", 0]]),
    ],
)
def test_one_that_raises_none_is_left_out(operation: Any) -> None:
    made = growing(("zero_", [["r", 0]]), operation)
    made.effects.append(1)
    assert [one.name for one in made.done().operations] == ["zero_"]


def test_the_memory_of_a_part_is_that_of_the_whole() -> None:
    made = growing(
        ("getitem", [["r", 0], 0]),
        ("getitem", [["r", 1], -1]),
        ("imul", [["r", 2], 2.0]),
        ("mul", [["r", 3], 2.0]),
        ("getitem", [["r", 4], 0]),
        ("stream", [["r", 0]]),
        ("add_", [["r", 6], 1.0]),
        ("float", [["r", 1]]),
        ("getitem", [["r", 8], 0]),
    )
    assert [made.root(number) for number in range(8)] == [0, 0, 0, 0, 4, 4, 6, 6]
    # The same tensor if it was of that dtype already.
    for number in (8, 9):
        with pytest.raises(Unclear):
            made.root(number)


def test_a_value_that_has_only_the_model_s_form_is_constant() -> None:
    made = growing(
        ("attribute", [["r", 0], "dtype"]),
        ("to", [["v", 0], ["r", 1]]),
        ("mul", [["r", 2], 2.0]),
        ("mul", [["r", 3], ["r", 0]]),
        ("clone", [["v", 0]]),
        ("clamp", [["v", 0]], {"min": ["r", 4]}),
    )
    assert [made.is_constant(number) for number in range(7)] == [False, True, True, True, False, True, False]


def test_an_edit_has_only_so_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_symbols, "_MOST_OPERATIONS", 3)
    made = growing(*[("zero_", [["r", 0]])] * 3)
    with pytest.raises(Unclear):
        made.emit("zero_", [["r", 0]])
    assert len(made.operations) == 3


def test_arguments_are_encoded_as_operations_have_them() -> None:
    made = growing()
    leaf, other = Leaf("vectors", ("a", 0)), Leaf("scale")
    found = [encoded(made, one) for one in (leaf, other, Leaf("vectors", ("a", 0)))]
    assert found == [["v", 0], ["v", 1], ["v", 0]]
    assert made.leaves == [["vectors", "a", 0], ["scale"]]
    assert encoded(made, Number(1.5)) == 1.5
    assert encoded(made, Number(True)) is True
    assert encoded(made, Dtype("float16")) == ["d", "float16"]
    assert encoded(made, Register(made, 4, 1)) == ["r", 4]
    assert encoded(made, ["e"]) == ["e"]
    assert encoded(made, "dtype") == "dtype"
    assert not made.operations


def test_an_operation_on_variables_is_made_once() -> None:
    made = growing(("zero_", [["r", 0]]))
    norm = Constant("norm", [Leaf("vector")], {})
    unit = Constant("truediv", [Leaf("vector"), norm], {"other": norm})
    assert encoded(made, unit) == ["r", 3]
    assert encoded(made, norm) == ["r", 2]
    assert encoded(made, unit) == ["r", 3]
    assert made.operations[1:] == [
        Operation("norm", [["v", 0]]),
        Operation("truediv", [["v", 0], ["r", 2]], {"other": ["r", 2]}),
    ]
    # An operation like it is another one: it makes a tensor of its own.
    assert encoded(made, Constant("norm", [Leaf("vector")], {})) == ["r", 4]


@pytest.mark.parametrize(
    ("symbol", "known"),
    [
        *((one, False) for one in (OTHER, OWN, STEP, Module("model"), Stream("model"), Name("torch"), Numbers((1, 2)))),
        *((one, True) for one in (Number(1), Leaf("a"), Dtype("float32"), Constant("norm", [], {}), ["e"], "dtype")),
    ],
)
def test_what_can_be_an_argument(symbol: Any, known: bool) -> None:
    assert is_known(symbol) == known
