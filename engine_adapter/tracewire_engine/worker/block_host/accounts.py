"""What is certain of the blocks of a request, from its encoded arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG
from tracewire_engine.protocol.messages import EditBlock

from .reading import Account, ModelPaths, account_of, union

__all__ = ["Accounts", "has_files"]

_block = msgspec.msgpack.Decoder(Block)
_edits = msgspec.msgpack.Decoder(list[EditBlock])


class Accounts:
    """The accounts of blocks, many of which are the same.

    Args:
        paths: of the model's modules.
    """

    def __init__(self, paths: ModelPaths) -> None:
        self._paths = paths
        self._account_of = lru_cache(256)(self._read)

    def of(self, arguments: dict[str, Any]) -> Account:
        """What is certain of a request's blocks. `arguments` are those of its `extra_args` for blocks."""
        try:
            blocks = [_edits.decode(arguments[EDITS_ARG])] if EDITS_ARG in arguments else []
            encoded = [bytes(edit.block) for edits in blocks for edit in edits]
            encoded += [arguments[BLOCK_ARG]] if BLOCK_ARG in arguments else []
            return union(map(self._account_of, encoded))
        except msgspec.DecodeError:
            # The host finds the same, and reports it.
            return Account()

    def _read(self, encoded: bytes) -> Account:
        account = account_of(_block.decode(encoded), self._paths)
        # A host asks for large variables when it takes the block, and none else shall wait for that.
        return replace(account, computes=False, edits=None) if _names_files(encoded) else account


def has_files(arguments: dict[str, Any]) -> bool:
    """Whether a request's block has a large variable, for which its host asks the worker when it takes the block."""
    return BLOCK_ARG in arguments and _names_files(arguments[BLOCK_ARG])


def _names_files(encoded: bytes) -> bool:
    try:
        waiting = [unpack(_block.decode(encoded).variables)]
    except ValueError:
        return False
    while waiting:
        one = waiting.pop()
        if isinstance(one, ArrayRef):
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return False
