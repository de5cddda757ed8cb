"""Accounts of a request's blocks, from its arguments."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.hosted_model import Model
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG
from tracewire_engine.protocol.messages import EditBlock
from tracewire_engine.worker.block_host.accounts import Accounts, has_files
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of

READS = "x = model.model.layers[0].output[0].clone().save()\n"
WRITES = "model.model.layers[1].output[0][:] = 0\n"


def encoded(source: str, **more: Any) -> bytes:
    return msgspec.msgpack.encode(Block(name="block", source=source, filename="mine.py", **more))


def accounts() -> Accounts:
    return Accounts(ModelPaths(outline_of(Model(2)), "model.layers"))


def test_all_blocks_of_a_request_count() -> None:
    known = accounts()
    alone = known.of({BLOCK_ARG: encoded(READS)})
    assert alone.computes
    assert alone.reads == {"model.model.layers.0.output"}
    edits = msgspec.msgpack.encode([EditBlock(name="edit", block=msgspec.Raw(encoded(WRITES)))])
    beside = known.of({BLOCK_ARG: encoded(READS), EDITS_ARG: edits})
    assert beside.computes
    assert beside.reads is None


def test_of_what_cannot_be_read_nothing_is_certain() -> None:
    found = accounts().of({BLOCK_ARG: b"\xc1"})
    assert not found.computes
    assert found.reads is None


def test_a_block_with_a_large_variable_shares_no_host() -> None:
    large = ArrayRef("float32", (8,), bytes(16), "00ff")
    block = encoded(READS, variables=pack({"large": large}))
    assert has_files({BLOCK_ARG: block})
    assert not has_files({BLOCK_ARG: encoded(READS)})
    assert not accounts().of({BLOCK_ARG: block}).computes
