"""What may travel, and where in a value stands what cannot."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.equality import equal
from tests.support.values import Colour, Custom, Mode, Pair
from tracewire_bus.wire.digests import digest
from tracewire_bus.wire.kinds import MAX_DEPTH, Unsavable, length, path_key
from tracewire_bus.wire.packing import pack, unpack, wire


def test_subclasses_of_natives_travel_as_their_base() -> None:
    value = {
        Mode.FAST: Colour.RED,
        "pair": Pair(1, [2]),
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, a=[1]),
    }
    arrived = unpack(pack(value))
    assert arrived == {"fast": 1, "pair": (1, [2]), "ordered": {"a": 1}, "default": {"a": [1]}}
    assert type(arrived["pair"]) is tuple
    assert digest(arrived) == digest(value)


def test_keys_are_told_apart_as_python_does() -> None:
    assert digest({1: "x"}) == digest({True: "x"}) == digest({1.0: "x"})
    assert digest({1: "x"}) != digest({"1": "x"})
    assert digest({1.5: "x"}) != digest({1: "x"})
    assert digest({math.inf: 1}) != digest({-math.inf: 1})


def test_length() -> None:
    for value, expected in [("täxt", 4), (b"abc", 3), (None, 1), (1.5, 1), (np.zeros((2, 3)), 6), ({1: 2}, 1), ((), 0)]:
        assert length(value) == expected


@pytest.mark.parametrize(
    ("value", "path", "said"),
    [
        (Custom(), (), "values.Custom"),
        ({"a": [1, Custom()]}, ("a", 1), "Custom"),
        ((bytearray(b"x"),), (0,), "bytearray"),
        (lambda: None, (), "function"),
        ([np.array([Custom()])], (0,), "dtype object"),
        ([np.array(["text"])], (0,), "dtype <U4"),
        (np.ma.masked_array([1.0], [True]), (), "MaskedArray"),
        (np.longdouble(1), (), "cannot travel"),
        (np.datetime64("2024-01-01"), (), "datetime64"),
        ({"a": {(1, torch.zeros(1)): 3}}, ("a", 1), "key of type Tensor"),
        ({"a": {torch.zeros(1)}}, ("a",), "key of type Tensor"),
        ({frozenset({2}): 3}, (), "key of type frozenset"),
        ({(1, 2**64)}, (1,), "64 bits"),
        ([torch.complex32], (0,), "dtype torch.complex32 cannot travel"),
        ({np.int64(1): 3}, (), "key of type int64"),
        ({math.nan: 3}, (), "NaN"),
        ({2**64: 3}, (), "64 bits"),
        (["\ud800"], (0,), "surrogate"),
        ({"\ud800": 1}, (), "surrogate"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: Any, path: tuple[Any, ...], said: str) -> None:
    for refuse in (pack, digest):
        with pytest.raises(Unsavable, match=said) as caught:
            refuse(value)
        assert caught.value.path == path
        assert said in caught.value.reason


def test_a_place_is_spelled_as_one_would_write_it() -> None:
    with pytest.raises(Unsavable, match=r"^at acts\[3\]\['mlp'\]: "):
        wire({"mlp": Custom()}, ("acts", 3))


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_containers_may_nest_only_so_deep(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert equal(unpack(pack(value)), value)
    for refuse in (pack, digest, lambda deep: equal(deep, deep)):
        with pytest.raises(Unsavable, match="nest deeper than 64"):
            refuse(wrap(value))


def test_depth_counts_from_the_place_given() -> None:
    assert wire([[1]], ("name",) * (MAX_DEPTH - 2)) == [[1]]
    with pytest.raises(Unsavable, match="nest deeper"):
        wire([[1]], ("name",) * (MAX_DEPTH - 1))


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    for refuse in (pack, digest):
        with pytest.raises(Unsavable, match="refer to themselves"):
            refuse(loop)


def test_path_keys() -> None:
    assert [path_key(key) for key in ("a", 1, 1.5, True, None, b"x")] == ["a", 1, 1.5, True, None, b"x"]
    assert type(path_key(Mode.FAST)) is str
    assert type(path_key(np.float64(1.5))) is float
    assert path_key(Pair(1, (Mode.FAST, True))) == (1, ("fast", True))
    assert type(path_key(Pair(1, 2))) is tuple
    for bad in ((1, [2]), frozenset({1}), np.int64(1), np.zeros(2), math.nan, 2**64, "\ud800"):
        with pytest.raises(Unsavable):
            path_key(bad, ("d",))
