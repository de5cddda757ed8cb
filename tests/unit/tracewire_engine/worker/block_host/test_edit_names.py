"""What the names of a block stand for, while its source is gone through."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_engine.protocol.block_host import ModuleOutline
from tracewire_engine.worker.block_host.edit_names import EditNames, stored
from tracewire_engine.worker.block_host.edit_symbols import OTHER, OWN, UNBOUND, Leaf, Module, Name, Number, Numbers
from tracewire_engine.worker.block_host.reading import ModelPaths

PATHS = ModelPaths([ModuleOutline("", "Model"), ModuleOutline("norm", "Norm")], "")


def names(source: str = "", **variables: Any) -> EditNames:
    block = Block(
        name="block", source=source, variables=pack(variables), modules={"torch": "torch"}, paths={"norm": "norm"}
    )
    return EditNames(block, PATHS, ast.parse(source), {})


def test_names_that_come_with_a_block() -> None:
    vector = np.ones(3, np.float32)
    found = names(vector=vector, counts=np.arange(3), layers=[1, 2], strength=0.5, by={"a": vector}, text="t")
    assert found["model"] == Module("model")
    assert found["norm"] == Module("model.norm")
    assert (found["tracer"], found["live"], found["torch"]) == (Name("tracer"), Name("live"), Name("torch"))
    assert (found["layers"], found["strength"]) == (Numbers((1, 2)), Number(0.5))
    assert (found["vector"], found["by"], found["counts"]) == (Leaf("vector"), Leaf("by"), Leaf("counts"))
    assert found["text"] is OTHER
    assert found.arrays == {Leaf("vector")}


@pytest.mark.parametrize(
    ("source", "own", "containers", "counts"),
    [
        ("n = 0", {"n"}, set(), {"n"}),
        ("k = []\nd = {}.save()", {"k", "d"}, {"k", "d"}, set()),
        ("t = 'a'", {"t"}, set(), set()),
        ("n = 0\nn = h", set(), set(), set()),
        ("for n in k:\n    n = 0", set(), set(), set()),
        ("a, b = 1, 2", set(), set(), set()),
        # An item is no name.
        ("k = []\nn = 0\nk[n] = h", {"k", "n"}, {"k"}, {"n"}),
    ],
)
def test_names_that_stand_for_what_the_block_has_made(
    source: str, own: set[str], containers: set[str], counts: set[str]
) -> None:
    found = names(source)
    assert (found.own, found.containers, found.counts) == (own, containers, counts)


def test_a_name_that_may_stand_for_nothing_is_told_from_one_that_stands_for_another_thing() -> None:
    source = "k = []\nif x:\n    k = []\n    y = 1\n    z = h"
    found = names(source)
    found["k"], found["z"] = OTHER, Number(1)
    statement = ast.parse(source).body[1]
    assert sorted(stored(statement)) == ["k", "y", "z"]
    assert found.forget(statement) == ["y"]
    assert (found["k"], found["y"], found["z"]) == (OWN, UNBOUND, OTHER)


@pytest.mark.parametrize(
    ("place", "key", "found"),
    [
        ("'a'", OWN, Leaf("by", ("a",))),
        ("2", Number(2), Leaf("by", (2,))),
        ("'b'", OWN, OTHER),
        ("True", Number(True), OTHER),
        ("2.0", Number(2.0), OTHER),
        ("n", OTHER, OTHER),
    ],
)
def test_an_item_of_a_variable(place: str, key: Any, found: Any) -> None:
    expression = ast.parse(place, mode="eval").body
    assert names(by={"a": 1.0, 2: 3.0}).item(Leaf("by"), expression, key) == found
