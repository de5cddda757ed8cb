"""Pinned memory that copies to the host are lent. A stand-in for a GPU: tensors that say they are on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_bus.wire.digests import digest
from tracewire_engine.worker import host_copy as hosting
from tracewire_engine.worker.host_copy import HostCopy, PinnedCopy, elements


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Event:
    """What has happened at once."""

    def record(self, stream: Any) -> None:
        """Nothing is waited for."""

    def synchronize(self) -> None:
        """Nor here."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each piece of pinned memory has that was made."""
    sizes: list[int] = []
    empty = torch.empty

    def pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        sizes.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(hosting.torch, "empty", pinned)
    monkeypatch.setattr(hosting.torch.cuda, "Event", Event)
    monkeypatch.setattr(hosting, "current_stream", lambda device: None)
    monkeypatch.setattr(PinnedCopy, "_free", {})
    return sizes


def on_device(count: int, first: int = 0) -> Any:
    """`count` bytes there."""
    return (torch.arange(first, first + count) % 251).to(torch.uint8).as_subclass(OnDevice)


def bytes_of(count: int, first: int = 0) -> bytes:
    """The same bytes."""
    return bytes((first + place) % 251 for place in range(count))


def test_copies_of_many_sizes_share_pinned_memory(made: list[int]) -> None:
    for count in (1, 4096, 4097, 5000, 8192, 3, 7000):
        copy = PinnedCopy(on_device(count, count))
        if count % 2:
            assert bytes(copy.lend()) == bytes_of(count, count)
            copy.release()
        else:
            assert bytes(copy.bytes()) == bytes_of(count, count)
    assert made == [4096, 8192]


def test_what_is_lent_is_nobody_elses_until_it_is_given_back(made: list[int]) -> None:
    copies = [PinnedCopy(on_device(4000, first)) for first in range(3)]
    assert made == [4096] * 3
    assert [bytes(copy.lend()) for copy in copies] == [bytes_of(4000, first) for first in range(3)]
    kept = copies[1].bytes()
    again = PinnedCopy(on_device(4000, 9))
    assert made == [4096] * 3
    assert bytes(again.lend()) == bytes_of(4000, 9)
    assert [bytes(copies[0].lend()), bytes(kept)] == [bytes_of(4000, 0), bytes_of(4000, 1)]


def test_very_large_ones_are_not_kept(made: list[int]) -> None:
    for _ in range(2):
        copy = PinnedCopy(on_device((16 << 20) + 1))
        copy.lend()
        copy.release()
    assert made == [32 << 20] * 2


def test_a_host_copy_joins_tensors_of_all_sorts() -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    values = [base, base.t(), base[1], base[:, 2], base[0, 0], base.to(torch.int8), base[3], base[1]]
    host = HostCopy()
    host.prime(values)
    arrays = [host.array(value) for value in values]
    for value, array in zip(values, arrays, strict=True):
        assert array.digest() == digest(value)
    assert elements(arrays) == b"".join(array.raw() for array in arrays)
    assert elements([]) == b""
