"""Which edits can be done to the rows of several requests at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire_engine.protocol.known_edits import Edit, Operation
from tracewire_engine.worker.block_host.edit_forms import bases_of, is_by_row, is_exact, items_of

VECTOR, NUMBER = np.ones(4, np.float32), np.float32(2.0)

ALL: list[Any] = ["s", None, None, None]
ITEM: tuple[str, list[Any]] = ("getitem", [["r", 0], 0])


def edit(*operations: tuple[Any, ...]) -> Edit:
    """An edit with leaves 0, a vector; 1, a number; and 2, an array of no axis."""
    made = [Operation(name, arguments, *more) for name, arguments, *more in operations]
    return Edit("model.model.layers.1.output", made, [["vector"], ["number"], ["scalar"]])


LEAVES = [VECTOR, 2.0, np.asarray(NUMBER)]

#: Edits of a tuple, each row of whose result comes of that row alone.
BY_ROW: dict[str, list[Any]] = {
    "scaled": [ITEM, ("imul", [["r", 1], 2.0])],
    "scaled by a variable": [ITEM, ("imul", [["r", 1], ["v", 1]])],
    "scaled by an array of no axis": [ITEM, ("imul", [["r", 1], ["v", 2]])],
    "the last row": [ITEM, ("setitem", [["r", 1], ["v", 0], -1])],
    "the only row by number": [ITEM, ("getitem", [["r", 1], 0]), ("iadd", [["r", 2], ["v", 0]])],
    "the rows of a slice": [ITEM, ("getitem", [["r", 1], ["s", -1, None, None]]), ("zero_", [["r", 2]])],
    "all of it": [ITEM, ("getitem", [["r", 1], ["e"]]), ("zero_", [["r", 2]])],
    "one column of all rows": [ITEM, ("getitem", [["r", 1], ALL, 3]), ("iadd", [["r", 2], 2.0])],
    "some columns of the last row": [ITEM, ("setitem", [["r", 1], 0.0, -1, ["s", 1, 3, None]])],
    "a vector of the model's dtype": [
        *(ITEM, ("attribute", [["r", 1], "dtype"]), ("to", [["v", 0], ["r", 2]])),
        ("iadd", [["r", 1], ["r", 3]]),
    ],
    "a direction removed": [
        *(ITEM, ("norm", [["v", 0]]), ("truediv", [["v", 0], ["r", 2]]), ("matmul", [["r", 1], ["r", 3]])),
        *(("unsqueeze", [["r", 4], -1]), ("mul", [["r", 5], ["r", 3]]), ("isub", [["r", 1], ["r", 6]])),
    ],
    "a direction removed with an axis of none": [
        *(ITEM, ("matmul", [["r", 1], ["v", 0]]), ("getitem", [["r", 2], ALL, ["n"]])),
        *(("mul", [["r", 3], ["v", 0]]), ("isub", [["r", 1], ["r", 4]])),
    ],
    "a sum of each row": [
        *(ITEM, ("mul", [["r", 1], ["v", 0]]), ("sum", [["r", 2]], {"dim": -1, "keepdim": True})),
        *(("mul", [["r", 3], ["v", 0]]), ("isub", [["r", 1], ["r", 4]])),
    ],
    "the stream": [("stream", [["r", 0]]), ("iadd", [["r", 1], ["v", 0]]), ("put_stream", [["r", 0], ["r", 2]])],
    "another item": [("getitem", [["r", 0], 1]), ("clamp_", [["r", 1]], {"min": -1, "max": 1.0})],
}

#: Edits that are done request by request.
ONE_BY_ONE: dict[str, list[Any]] = {
    "the tuple itself": [("zero_", [["r", 0]])],
    "another row": [ITEM, ("getitem", [["r", 1], 1]), ("zero_", [["r", 2]])],
    "the rows but the last": [ITEM, ("getitem", [["r", 1], ["s", None, -1, None]]), ("zero_", [["r", 2]])],
    "the rows from the second on": [ITEM, ("setitem", [["r", 1], 0.0, ["s", 1, None, None]])],
    "the norm of all": [ITEM, ("norm", [["r", 1]]), ("itruediv", [["r", 1], ["r", 2]])],
    "the mean of the rows": [ITEM, ("mean", [["r", 1]], {"dim": 0}), ("isub", [["r", 1], ["r", 2]])],
    "the mean of an axis that is counted from the front": [
        *(ITEM, ("mean", [["r", 1]], {"dim": 1, "keepdim": True}), ("isub", [["r", 1], ["r", 2]])),
    ],
    "a sum without its axis": [ITEM, ("sum", [["r", 1]], {"dim": -1}), ("isub", [["r", 1], ["r", 2]])],
    "a sum in another dtype": [
        *(ITEM, ("sum", [["r", 1]], {"dim": -1, "keepdim": True, "dtype": ["d", "float64"]})),
        ("isub", [["r", 1], ["r", 2]]),
    ],
    "columns as if they were rows": [ITEM, ("matmul", [["r", 1], ["v", 0]]), ("isub", [["r", 1], ["r", 2]])],
    "a number for each row to an item": [ITEM, ("getitem", [["r", 1], ALL, 3]), ("setitem", [["r", 1], ["r", 2], -1])],
    "rows times rows": [ITEM, ("matmul", [["r", 1], ["r", 1]]), ("isub", [["r", 1], ["r", 2]])],
    "a row added to a vector": [ITEM, ("iadd", [["v", 0], ["r", 1]])],
    "a column of a column": [ITEM, ("getitem", [["r", 1], ALL, 3]), ("getitem", [["r", 2], 0]), ("zero_", [["r", 3]])],
    "a column of the last row": [ITEM, ("getitem", [["r", 1], -1, 3]), ("zero_", [["r", 2]])],
    "three axes": [ITEM, ("getitem", [["r", 1], ALL, ALL, 0]), ("zero_", [["r", 2]])],
    "rows clamped by rows": [ITEM, ("clamp_", [["r", 1]], {"min": ["v", 0]})],
    "something added with a factor": [ITEM, ("add_", [["r", 1], ["v", 0]], {"alpha": 2})],
    "an axis in front": [ITEM, ("unsqueeze", [["r", 1], 0]), ("mul", [["r", 2], 2.0]), ("copy_", [["r", 1], ["r", 3]])],
    "a text": [ITEM, ("imul", [["r", 1], "text"])],
}


@pytest.mark.parametrize("name", BY_ROW)
def test_edits_of_each_row_by_itself_are_done_at_once(name: str) -> None:
    assert is_by_row(edit(*BY_ROW[name]), LEAVES, whole=False)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_edits_in_which_rows_meet_are_done_one_by_one(name: str) -> None:
    assert not is_by_row(edit(*ONE_BY_ONE[name]), LEAVES, whole=False)


@pytest.mark.parametrize(
    ("whole", "operations"),
    [
        (True, [("getitem", [["r", 0], ALL, 7]), ("iadd", [["r", 1], 2.0])]),
        (True, [("imul", [["r", 0], 2.0])]),
        (True, [("getitem", [["r", 0], 0]), ("imul", [["r", 1], ["v", 0]])]),
        (False, [("getitem", [["r", 0], ALL, 7]), ("iadd", [["r", 1], 2.0])]),
        (False, [("imul", [["r", 0], 2.0])]),
    ],
)
def test_a_value_that_is_a_tensor_has_rows_itself(whole: bool, operations: list[Any]) -> None:
    assert is_by_row(edit(*operations), LEAVES, whole=whole) == whole


@pytest.mark.parametrize(
    ("names", "exact"),
    [
        (["getitem", "add", "setitem"], True),
        (["stream", "imul", "put_stream"], True),
        (["attribute", "to", "iadd", "zero_", "clamp_", "sqrt"], True),
        ([], True),
        *((["getitem", one], False) for one in ("matmul", "imatmul", "sum", "mean", "norm", "unsqueeze")),
        *((["getitem", one], False) for one in ("exp", "rsqrt", "sigmoid", "tanh")),
    ],
)
def test_sums_and_what_is_computed_in_vectors_depends_on_what_lies_beside(names: list[str], exact: bool) -> None:
    assert is_exact(edit(*((name, [["r", 0]]) for name in names))) == exact


@pytest.mark.parametrize(
    ("operations", "whole", "bases", "items"),
    [
        ([ITEM, ("getitem", [["r", 1], 0])], False, {1}, {0}),
        ([ITEM, ("getitem", [["r", 0], -1])], False, {1, 2}, {0, -1}),
        ([ITEM, ("getitem", [["r", 1], 0])], True, {0}, None),
        ([("stream", [["r", 0]]), ("put_stream", [["r", 0], ["r", 1]])], False, {1}, None),
        ([("stream", [["r", 0]]), ("put_stream", [["r", 0], ["r", 1]])], True, {0, 1}, None),
        ([ITEM, ("stream", [["r", 0]])], False, {1, 2}, None),
        ([("getitem", [["r", 0], ALL])], False, set(), set()),
        ([("getitem", [["r", 0], 0, 1])], False, set(), set()),
        ([], False, set(), set()),
    ],
)
def test_the_model_s_tensors_and_the_items_that_are_used(
    operations: list[Any], whole: bool, bases: set[int], items: set[int] | None
) -> None:
    made = edit(*operations)
    assert bases_of(made, whole=whole) == bases
    assert items_of(made, whole=whole) == items
