"""Puts what blocks in hosts leave at a location into the model's value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tracewire_engine.link.shared_rows import RowBytes
from tracewire_engine.protocol.block_host import Reply

from .rows import SharedRows

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
                one.shared.write_back(one.reply, one.memory)
            usable.append(one)
        except Exception as error:
            fail(one.owner, error)
    for one in usable:
        try:
            if one.reply.replaced is not None:
                value = one.shared.replace(value, one.reply, one.memory, fresh)
        except Exception as error:
            fail(one.owner, error)
    return value
