"""Where a block is while its source is gone through, and what is known of what it writes there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.support.hosted_model import Model
from tracewire_engine.worker.block_host.edit_symbols import OTHER, OWN, Constant, Dtype, Leaf, Number, Register, Unclear
from tracewire_engine.worker.block_host.edit_walk import EditWalk
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of

ALL: list[Any] = ["s", None, None, None]
VECTOR = Leaf("vector")


def walk(*taps: str) -> EditWalk:
    return EditWalk(ModelPaths(outline_of(Model(4)), "model.layers", taps), frozenset({Leaf("vector")}), frozenset())


def at(layer: int, side: str = "output") -> str:
    return f"model.model.layers.{layer}.{side}"


@pytest.mark.parametrize(
    ("locations", "unclear"),
    [
        ([at(0), at(1), at(3), "model.logits"], False),
        ([at(1, "input"), at(1), at(2, "input")], False),
        ([at(1), at(1)], False),
        ([at(2), at(1)], True),
        ([at(2), at(2, "input")], True),
        (["model.logits", at(3)], True),
        ([at(1), at(2), at(1)], True),
        # Only the layers are known to be in order.
        (["model.model.norm.output"], True),
        ([at(3), "model.model.norm.output"], True),
        ([at(3), "model.logits", "model.samples"], False),
        (["model.samples", "model.logits"], True),
    ],
)
def test_a_location_that_the_model_may_have_passed_is_unclear(locations: list[str], unclear: bool) -> None:
    """A block may wait there for the next step, and then it is a step behind."""
    made = walk()
    for location in locations[:-1]:
        made.ask(location)
    with pytest.raises(Unclear) if unclear else nullcontext():
        made.ask(locations[-1])


def test_a_location_that_the_engine_does_not_serve_is_unclear() -> None:
    made = walk(at(1))
    made.ask(at(1))
    made.ask("model.logits")
    with pytest.raises(Unclear):
        walk(at(1)).ask(at(2))


def test_nothing_is_changed_once_it_is_unsure() -> None:
    made = walk()
    value = made.ask(at(1))
    made.change(value, "zero_", [])
    assert made.doubt(OWN) is OWN
    with pytest.raises(Unclear):
        made.change(value, "zero_", [])
    (edit,) = made.found()
    assert [one.name for one in edit.operations] == ["zero_"]


def test_nothing_is_changed_where_the_block_may_not_be() -> None:
    made = walk()
    value = made.ask(at(1))
    made.maybe = 1
    with pytest.raises(Unclear):
        made.change(value, "zero_", [])


@pytest.mark.parametrize("left", [True, False])
def test_a_value_of_an_earlier_visit_is_not_changed(left: bool) -> None:
    made = walk()
    value = made.ask(at(1))
    made.leave() if left else made.ask(at(2))
    assert made.operation("mul", [value, Number(2)], {}) is OTHER
    with pytest.raises(Unclear):
        made.change(value, "zero_", [])


def test_values_of_two_locations_do_not_mix() -> None:
    made = walk()
    first = made.ask(at(1))
    second = made.ask(at(2))
    assert made.operation("add", [second, first], {}) is OTHER
    with pytest.raises(Unclear):
        made.change(second, "iadd", [first])


@pytest.mark.parametrize("argument", [OTHER, OWN])
def test_a_change_by_something_unknown_is_unclear(argument: Any) -> None:
    made = walk()
    with pytest.raises(Unclear):
        made.change(made.ask(at(1)), "iadd", [argument])


def test_a_change_of_a_constant_is_unclear() -> None:
    """The next step would find it changed."""
    made = walk()
    value = made.ask(at(1))
    dtype = made.operation("attribute", [value, "dtype"], {})
    vector = made.operation("to", [VECTOR, dtype], {})
    with pytest.raises(Unclear):
        made.change(vector, "mul_", [Number(2)])
    unit = made.operation("mul", [vector, Number(2)], {})
    with pytest.raises(Unclear):
        made.change(unit, "mul_", [Number(2)])
    # A part of the model's value that has nothing but its form is none.
    made.change(made.operation("mul", [value, unit], {}), "mul_", [Number(2)])


@pytest.mark.parametrize("target", [VECTOR, Number(1), OTHER, Constant("norm", [VECTOR], {})])
def test_a_change_of_what_is_not_the_model_s_is_unclear(target: Any) -> None:
    made = walk()
    made.ask(at(1))
    with pytest.raises(Unclear):
        made.change(target, "mul_", [Number(2)])
    assert not made.changes


def test_a_change_of_the_block_s_own_is_noted() -> None:
    made = walk()
    assert made.change(OWN, "mul_", [Number(2)]) is OWN
    assert made.changes
    assert made.unsure


def test_an_edit_has_the_steps_in_which_it_was_found() -> None:
    made = walk()
    made.ask(at(0))
    made.steps = (2, 4)
    made.change(made.ask(at(1)), "zero_", [])
    (edit,) = made.found()
    assert (edit.location, edit.first, edit.end) == (at(1), 2, 4)


def test_a_location_that_was_only_read_before_may_be_edited_in_other_steps() -> None:
    made = walk()
    made.operation("getitem", [made.ask(at(1)), Number(0)], {})
    made.steps = (0, None)
    made.leave()
    made.reached = (-1, False)
    made.change(made.ask(at(1)), "zero_", [])
    (edit,) = made.found()
    assert ([one.name for one in edit.operations], edit.first, edit.end) == (["zero_"], 0, None)


def test_a_location_that_was_edited_in_other_steps_is_unclear() -> None:
    made = walk()
    made.change(made.ask(at(1)), "zero_", [])
    made.steps = (1, None)
    with pytest.raises(Unclear):
        made.ask(at(1))


def test_in_steps_that_nobody_knows_nothing_is_changed() -> None:
    made = walk()
    made.steps = None
    value = made.ask(at(1))
    assert made.operation("mul", [value, Number(2)], {}) is OTHER
    with pytest.raises(Unclear):
        made.change(value, "zero_", [])
    assert made.found() == []


def stream_of(made: EditWalk) -> tuple[Register, Register]:
    """A layer's output, and its residual stream."""
    whole = made.ask(at(1))
    return whole, Register(whole.edit, whole.edit.emit("stream", [["r", 0]]), whole.visit)


def test_a_change_of_a_stream_puts_it_back() -> None:
    made = walk()
    _, stream = stream_of(made)
    made.change(made.operation("getitem", [stream, Number(-1)], {}), "iadd", [VECTOR])
    (edit,) = made.found()
    assert [one.name for one in edit.operations] == ["stream", "getitem", "iadd", "put_stream"]
    assert edit.operations[-1].arguments == [["r", 0], ["r", 1]]
    assert edit.leaves == [["vector"]]


def test_a_stream_and_an_item_of_one_layer_are_not_both_changed() -> None:
    made = walk()
    whole, stream = stream_of(made)
    made.change(stream, "imul", [Number(2)])
    made.change(made.operation("getitem", [whole, Number(0)], {}), "imul", [Number(2)])
    with pytest.raises(Unclear):
        made.found()


@pytest.mark.parametrize(
    ("name", "arguments", "options", "sure"),
    [
        ("norm", [VECTOR], {}, True),
        ("mul", [VECTOR, Number(2)], {}, True),
        ("truediv", [VECTOR, Constant("norm", [VECTOR], {})], {}, True),
        ("to", [VECTOR, Dtype("float32")], {}, True),
        ("add", [VECTOR, VECTOR], {}, False),
        ("matmul", [VECTOR, VECTOR], {}, False),
        ("norm", [VECTOR], {"dim": Number(7)}, False),
        ("norm", [Leaf("text")], {}, False),
        ("mul", [Leaf("vector", (0,)), Number(2)], {}, False),
        ("to", [VECTOR, Number(1)], {}, False),
        ("unsqueeze", [VECTOR, Number(9)], {}, False),
    ],
)
def test_an_operation_on_variables_may_raise_an_error(
    name: str, arguments: list[Any], options: dict[str, Any], sure: bool
) -> None:
    made = walk()
    assert isinstance(made.operation(name, arguments, options), Constant)
    assert made.unsure != sure


@pytest.mark.parametrize(
    ("fills", "goes_by_list", "leaf", "clear"),
    [
        (False, True, Leaf("by", ("a",)), True),
        (True, False, VECTOR, True),
        (True, True, VECTOR, False),
        (True, False, Leaf("by", ("a",)), False),
    ],
)
def test_a_container_that_the_block_adds_to_says_nothing(
    fills: bool, goes_by_list: bool, leaf: Leaf, clear: bool
) -> None:
    made = walk()
    made.change(made.ask(at(1)), "iadd", [leaf])
    made.fills, made.goes_by_list = fills, goes_by_list
    if clear:
        assert len(made.found()) == 1
    else:
        with pytest.raises(Unclear):
            made.found()
