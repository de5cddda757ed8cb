"""Digests of encoded values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_bus.wire.digests import digest, encoded_digest
from tracewire_bus.wire.packing import wire


@pytest.mark.parametrize("size", [*range(24), 250, 300, 70_000])
def test_an_encoded_array_has_the_array_s_digest(size: int) -> None:
    value = torch.arange(size).to(torch.int8)
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) == digest(value)


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", [torch.ones(2)], (torch.ones(2),), 1j, 2**70])
def test_what_is_no_array_has_no_such_digest(value: Any) -> None:
    assert encoded_digest(msgspec.msgpack.encode(wire(value))) is None
