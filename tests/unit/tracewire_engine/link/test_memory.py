"""Bytes at addresses."""

from __future__ import annotations

import torch

from tracewire_engine.link.memory import copy_bytes, same_bytes


def test_pieces_are_compared_by_all_of_their_bytes() -> None:
    one = torch.arange(1000, dtype=torch.uint8)
    other = one.clone()
    assert same_bytes(one.data_ptr(), other.data_ptr(), 1000)
    other[999] += 1
    assert not same_bytes(one.data_ptr(), other.data_ptr(), 1000)
    assert same_bytes(one.data_ptr(), other.data_ptr(), 999)


def test_nothing_is_read_where_no_piece_lies() -> None:
    one = torch.ones(8)
    assert not same_bytes(one.data_ptr(), 0, 32)
    assert not same_bytes(0, one.data_ptr(), 32)
    assert same_bytes(0, 0, 0)


def test_bytes_are_copied() -> None:
    source, target = torch.arange(6.0), torch.zeros(6)
    copy_bytes(target.data_ptr() + 4, source.data_ptr(), 12)
    assert target.tolist() == [0, 0, 1, 2, 0, 0]
