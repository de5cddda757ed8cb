"""What is certain of the blocks of a request, from its encoded arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG
from tracewire_engine.protocol.known_edits import Edit
from tracewire_engine.protocol.messages import EditBlock

from .edit_runs import MOST_HELD, UnfitLeaf, check_growth, held_by, leaves_of
from .known_edits import edits_of
from .reading import Account, ModelPaths, account_of, union

__all__ = ["Accounts", "encoded_blocks", "has_files", "known_leaves"]

_block = msgspec.msgpack.Decoder(Block)
_edits = msgspec.msgpack.Decoder(list[EditBlock])

#: The names of live parameters with their forms: a type, or the dtype and shape of an array.
_LiveForms: TypeAlias = tuple[tuple[str, Any], ...]


class Accounts:
    """The accounts of blocks, many of which are the same.

    Args:
        paths: of the model's modules.
        edits: whether the worker does what blocks write where their source shows that. Such blocks then count as ones
            that only read.
    """

    def __init__(self, paths: ModelPaths, *, edits: bool = False) -> None:
        self._paths, self._edits = paths, edits
        #: The locations whose edits are left to the blocks.
        self._unfit: set[str] = set()
        self._account_of = lru_cache(256)(self._read)

    def of(
        self,
        arguments: dict[str, Any],
        room: int = MOST_HELD,
        live: Mapping[str, Any] = MappingProxyType({}),
    ) -> Account:
        """What is certain of a request's blocks.

        Args:
            arguments: those of its `extra_args` for blocks.
            room: how many bytes its edits may hold.
            live: the values of its live parameters, by name. No change changes their forms.
        """
        try:
            forms = tuple([(name, _form_of(live[name])) for name in sorted(live)])
            accounts = [self._account_of(one, forms) for one in encoded_blocks(arguments)]
        except msgspec.DecodeError:
            # The host finds the same, and reports it.
            return Account()
        if len(accounts) != 1 or accounts[0].known is None:
            # What several blocks of a request do depends on each other.
            return union([replace(one, keeps=one.keeps and one.known is None) for one in accounts])
        (account,) = accounts
        assert account.known is not None
        if account.held > room or any(edit.location in self._unfit for edit in account.known):
            return replace(account, known=None, keeps=False)
        return replace(account, reads=account.asks)

    def leave(self, location: str) -> None:
        """Leave edits of a location to the blocks from now on."""
        self._unfit.add(location)

    def _read(self, encoded: bytes, forms: _LiveForms) -> Account:
        block = _block.decode(encoded)
        account = account_of(block, self._paths)
        # A host asks for large variables when it takes the block, and none else shall wait for that.
        if _names_files(encoded):
            return replace(account, computes=False, edits=None)
        if self._edits and account.computes and account.reads is None and account.asks is not None:
            return _with_edits(account, block, self._paths, {name: _example(form) for name, form in forms})
        return account


def _form_of(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)


def _example(form: Any) -> Any:
    """A value of a live parameter's form."""
    return np.zeros(form[1], form[0]) if isinstance(form, tuple) else form()


def _with_edits(account: Account, block: Block, paths: ModelPaths, live: Mapping[str, Any]) -> Account:
    """The account of a block, with all that it writes, if its source and its variables show it.

    `live`: values of its live parameters, by name. Only their forms matter.
    """
    found = edits_of(block, paths, live)
    if found is None:
        return account
    try:
        for edit in found.edits:
            check_growth(edit, leaves_of(block.variables, [edit], live))
    except UnfitLeaf:
        return account
    held = held_by(found.edits, leaves_of(block.variables, found.edits, live))
    return replace(account, known=found.edits, keeps=found.keeps, held=held)


def encoded_blocks(arguments: dict[str, Any]) -> list[bytes]:
    """The encoded blocks of a request: standing interventions, then its own.

    Raises:
        msgspec.DecodeError: they are not what an adapter sends.
    """
    blocks = [_edits.decode(arguments[EDITS_ARG])] if EDITS_ARG in arguments else []
    encoded = [bytes(edit.block) for edits in blocks for edit in edits]
    return encoded + ([arguments[BLOCK_ARG]] if BLOCK_ARG in arguments else [])


def known_leaves(arguments: dict[str, Any], edits: Sequence[Edit], live: Mapping[str, Any]) -> list[Any]:
    """The values of the leaves of a request's edits (see `leaves_of`), of which its only block has the variables.

    `live`: the values of its live parameters, by name.
    """
    (encoded,) = encoded_blocks(arguments)
    return leaves_of(_block.decode(encoded).variables, edits, live)


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
