"""Puts what blocks in hosts leave at a location into the model's value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tracewire_engine.link.shared_rows import RowBytes
from tracewire_engine.protocol.block_host import Reply, Shape

from .row_buffer import RowBuffer
from .rows import SharedRows, joined

__all__ = ["Left", "merged"]

_Owner = TypeVar("_Owner")


class Left(NamedTuple, Generic[_Owner]):
    """What the blocks of a host, its `owner`, leave: the rows that they were served, the reply, and its tensors."""

    owner: _Owner
    shared: SharedRows
    reply: Reply
    memory: RowBytes


def merged(value: Any, left: Iterable[Left[_Owner]], fail: Callable[[_Owner, Exception], None]) -> Any:
    """The model's value with the rows that blocks have changed in place, and then those that blocks have assigned.

    Args:
        value: the model's.
        left: what the blocks leave, in the order of their hosts.
        fail: takes an error of a host's rows, such as rows that do not fit. None of its rows are put in after that.
    """
    fresh: dict[int, torch.Tensor] = {}
    usable = []
    for one in left:
        try:
            if one.reply.edited:
                one.shared.check_edits(one.reply, one.memory)
            usable.append(one)
        except Exception as error:
            fail(one.owner, error)
    failed: set[int] = set()
    for tensor, parts in _edits(usable):
        try:
            _put_in(tensor, parts)
        except Exception:  # such as that memory is full: the rows of each host are tried by themselves
            for part in parts:
                try:
                    _put_in(tensor, [part])
                except Exception as error:
                    failed.add(id(part[0]))
                    fail(part[0].owner, error)
    for one in usable:
        try:
            if one.reply.replaced is not None and id(one) not in failed:
                value = one.shared.replace(value, one.reply, one.memory, fresh)
        except Exception as error:
            fail(one.owner, error)
    return value


def _edits(left: Iterable[Left[_Owner]]) -> Iterable[tuple[torch.Tensor, list[tuple[Left[_Owner], Shape]]]]:
    """Each tensor of the value that blocks have changed in place, and the rows of each host."""
    found: dict[int, tuple[torch.Tensor, list[tuple[Left[_Owner], Shape]]]] = {}
    for one in left:
        for index, shape in one.reply.edited:
            tensor = one.shared.tensors[index]
            found.setdefault(id(tensor), (tensor, []))[1].append((one, shape))
    return found.values()


def _put_in(tensor: torch.Tensor, parts: list[tuple[Left[_Owner], Shape]]) -> None:
    """Put the rows of hosts into a tensor: on a GPU with one copy, if they lie next to each other."""
    place = parts[0][0].shared.place_of(tensor)
    # What belongs to no request, no request's block may change.
    if place is None or not tensor.nbytes:
        return
    axis, by_request = place
    row = tensor.nbytes // tensor.shape[axis]
    spans = joined(sorted([span for one, _ in parts for span in one.shared.rows.spans(by_request=by_request)]))
    low, high = spans[0][0], sum(spans[-1])
    buffer = RowBuffer.take((high - low) * row, pinned=tensor.is_cuda)
    held = buffer.array[: (high - low) * row].reshape(high - low, row)
    for one, shape in parts:
        # The first copy of what the host has written. What it writes there later changes nothing.
        rows = one.shared.rows
        count, index = rows.count(by_request=by_request), rows.index(low, by_request=by_request)
        held[index] = one.memory.rows(shape.start, count, row)
    for first, count in spans:
        size = torch.Size([*tensor.shape[:axis], count, *tensor.shape[axis + 1 :]])
        # Waits for the copy, so that the buffer is free then. The GPU has nothing else to do: the model has waited.
        tensor.narrow(axis, first, count).copy_(buffer.tensor(tensor.dtype, size, (first - low) * row))
    buffer.give_back()
