"""Digests of encoded values."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import tracewire_engine  # noqa: F401 (before nnsight)
from tests.support.equality import equal
from tests.support.values import trees
from tracewire_bus.wire.digests import digest, encoded_digest
from tracewire_bus.wire.packing import pack, wire


@pytest.mark.parametrize("size", [*range(24), 250, 300, 70_000])
def test_an_encoded_array_has_the_array_s_digest(size: int) -> None:
    value = torch.arange(size).to(torch.int8)
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) == digest(value)


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", [torch.ones(2)], (torch.ones(2),), 1j, 2**70])
def test_what_is_no_array_has_no_such_digest(value: Any) -> None:
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) is None


@settings(max_examples=300, deadline=None)
@given(trees, trees)
def test_digests_are_equal_just_when_values_are(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == equal(a, b)


def test_digests_tell_apart_what_python_calls_equal() -> None:
    alike = [1, 1.0, True, 1 + 0j, "1", b"1", np.int64(1), np.float64(1), [1], (1,), {1: 1}, None]
    assert len({digest(value) for value in alike}) == len(alike)
    assert digest(0.0) != digest(-0.0)
    assert digest([[1], [2]]) != digest([[1, 2]])
    assert digest(np.zeros((2, 3))) != digest(np.zeros((3, 2)))


def test_the_order_of_a_dict_does_not_count() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert equal({"a": 1, "b": [2]}, {"b": [2], "a": 1})


def test_equal_sets_are_equal_on_the_wire_and_by_digest() -> None:
    grown, shrunk = set(range(8)), set(range(1000))
    shrunk -= set(range(8, 1000))
    assert pack(grown) == pack(shrunk)
    assert digest({1, (True, 0.0)}) == digest({True, (1, 0)})
    assert len({digest(one) for one in ({1}, frozenset({1}), [1], (1,), {1: 1}, {(1,)}, {"1"})}) == 7
