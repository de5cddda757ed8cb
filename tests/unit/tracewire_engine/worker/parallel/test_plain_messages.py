"""Values between stages come back as they were, and nothing of a message is executed."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import pytest
import torch

from tracewire_engine.worker.parallel.plain_messages import Tensors, Unsendable, decoded, encoded, unpacked


def there_and_back(value: Any) -> Any:
    tensors = Tensors()
    data = encoded(value, tensors)
    return decoded(data, unpacked(tensors.table, tensors.bytes(), torch.device("cpu")))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**63), 2**64 - 1, 0.5, "text \N{GREEK SMALL LETTER PI}", b"bytes", [], (), {}),
        *([1, (2, [3])], {"a": 1, 2: (3,), (4, "b"): None}, torch.Size([2, 3]), torch.bfloat16, 1 + 2j),
        torch.device("cpu"),
    ],
    ids=repr,
)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_a_tensor_comes_back_in_memory_of_its_own() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    back = there_and_back({"a": whole[:, 1:3], "b": [torch.nn.Parameter(whole), torch.empty(0)]})
    assert torch.equal(back["a"], whole[:, 1:3])
    assert torch.equal(back["b"][0], whole)
    assert back["b"][1].shape == (0,)
    back["a"].zero_()
    assert torch.equal(back["b"][0], whole)


class _Own:
    pass


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [(_Own(), "_Own"), (print, "builtin"), ({1}, "set"), (2**70, "64 bits"), (_nested(100), "deeper than 64")],
)
def test_what_cannot_travel_is_named(value: Any, says: str) -> None:
    with pytest.raises(Unsendable, match=says):
        encoded([value], Tensors())


class _Executes:
    def __reduce__(self) -> Any:
        return os.system, ("echo executed",)


def test_a_pickle_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(os, "system", called.append)
    for protocol in range(6):
        data = pickle.dumps(_Executes(), protocol=protocol)
        with pytest.raises(ValueError) as refused:
            decoded(data, [])
        assert str(refused.value)
    assert not called


def test_a_malformed_message_raises_a_value_error() -> None:
    chosen = random.Random(11)
    tensors = Tensors()
    data = encoded({"a": (torch.ones(3), [1, "x", None]), "b": torch.float32, "c": torch.Size([1])}, tensors)
    found = unpacked(tensors.table, tensors.bytes(), torch.device("cpu"))
    refused = 0
    for _ in range(20_000):
        changed = bytearray(data)
        for _ in range(chosen.randrange(1, 4)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        try:
            decoded(bytes(changed), found)
        except ValueError:
            refused += 1
    assert refused > 1000
