"""What can be put into the library, and what is refused, by the field at fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracewire import InvalidEntry
from tracewire.library.entry import LibraryEntry, checked_arrays, checked_message
from tracewire_bus.store.library import Stored

VECTOR = np.linspace(-1, 1, 8)


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        ("vector", VECTOR, ["vector"]),
        ("vector", [1.0, 2.0], ["vector"]),
        ("vector", {3: VECTOR, 11: VECTOR}, ["vector.3", "vector.11"]),
        ("vector", {"vector.3": VECTOR}, ["vector.3"]),
        ("subspace", np.eye(3, 8), ["basis"]),
        ("probe", VECTOR, ["weight"]),
        ("probe", {"weight": np.eye(2, 8), "bias": np.zeros(2)}, ["weight", "bias"]),
        ("probe", {"weight": VECTOR, "bias": np.float32(0.5)}, ["weight", "bias"]),
        ("probe", {"weight.1": VECTOR, "bias.1": 0.5}, ["weight.1", "bias.1"]),
        ("autoencoder", {"W_enc": np.eye(8, 16), "W_dec": np.eye(16, 8)}, ["W_enc", "W_dec"]),
    ],
)
def test_arrays_of_each_kind(kind: str, given: Any, names: list[str]) -> None:
    found = checked_arrays("calm", kind, given)
    assert list(found) == names
    assert {array.dtype.name for array in found.values()} == {"float32"}


@pytest.mark.parametrize(
    ("kind", "given", "field", "message"),
    [
        ("vector", np.eye(2), "arrays", "expected shape [hidden], got shape [2, 2]"),
        ("vector", {}, "arrays", "at least one array"),
        ("vector", {"else": VECTOR}, "arrays", "got the key 'else'"),
        ("vector", {-1: VECTOR}, "arrays", "got the key -1"),
        ("vector", {1: VECTOR, 2: VECTOR[:4]}, "arrays", "one shape for all layers"),
        ("vector", "text", "arrays", "expected an array of numbers"),
        ("vector", [10**400], "arrays", "expected an array of numbers"),
        ("vector", [np.nan], "arrays", "NaN or an infinity"),
        ("vector", np.array(["a"]), "arrays", "expected an array of numbers"),
        ("subspace", VECTOR, "arrays", "expected shape [rows, hidden]"),
        ("probe", np.zeros((1, 1, 1)), "arrays", "expected shape [hidden] or shape [rows, hidden]"),
        ("autoencoder", VECTOR, "arrays", "the arrays of an autoencoder by name"),
        ("autoencoder", {"W_enc": [np.inf]}, "arrays['W_enc']", "NaN or an infinity"),
    ],
)
def test_arrays_that_no_entry_can_have(kind: str, given: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidEntry) as refused:
        checked_arrays("calm", kind, given)
    assert refused.value.field == field
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kind": "sae"}, "kind"),
        ({"model": 3}, "model"),
        ({"licence": None}, "licence"),
        ({"provenance": "by hand"}, "provenance"),
        ({"effect": {"score": object()}}, "effect"),
        ({"effect": {"score": 2**64}}, "effect"),
        ({"provenance": {"seed": -(2**63) - 1}}, "provenance"),
        ({"settings": {1: 2}}, "settings"),
    ],
)
def test_what_an_entry_cannot_say(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidEntry) as refused:
        checked_message("calm", VECTOR, options, "one")
    assert refused.value.field == field


def test_arrays_by_layer_have_no_other_place() -> None:
    with pytest.raises(InvalidEntry) as refused:
        checked_message("calm", {3: VECTOR}, {"at": "residual(3)"}, "one")
    assert refused.value.field == "at"


def test_an_entry_as_callers_see_it() -> None:
    message, _ = checked_message("calm", {3: VECTOR, 1: VECTOR}, {"effect": {"score": np.float32(0.5)}}, "one")
    entry = LibraryEntry.of(Stored("red", "calm", 2, 10.0, "up", message))
    assert (entry.id, entry.layers, entry.by, entry.effect) == ("red:calm@2", (1, 3), "one", {"score": 0.5})
    assert entry.shapes == {"vector.3": (8,), "vector.1": (8,)}
    gone = LibraryEntry.of(Stored("", "calm", 2, 10.0, "up", None, 11.0, "two"))
    assert (gone.id, gone.removed, gone.removed_by, gone.digest) == ("calm@2", 11.0, "two", "")
