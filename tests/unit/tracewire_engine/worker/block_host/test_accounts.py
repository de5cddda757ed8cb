"""Accounts of a request's blocks, from its arguments."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.hosted_model import Model
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.keys import BLOCK_ARG, EDITS_ARG
from tracewire_engine.protocol.messages import EditBlock
from tracewire_engine.worker.block_host.accounts import Accounts, has_files, known_leaves
from tracewire_engine.worker.block_host.reading import ModelPaths
from tracewire_engine.worker.block_host.setup import outline_of

READS = "x = model.model.layers[0].output[0].clone().save()\n"
WRITES = "model.model.layers[1].output[0][:] = 0\n"


def encoded(source: str, **more: Any) -> bytes:
    return msgspec.msgpack.encode(Block(name="block", source=source, filename="mine.py", **more))


def accounts(*, edits: bool = False) -> Accounts:
    return Accounts(ModelPaths(outline_of(Model(2)), "model.layers"), edits=edits)


def standing(source: str) -> bytes:
    """A standing intervention, encoded."""
    return msgspec.msgpack.encode([EditBlock(name="edit", block=msgspec.Raw(encoded(source)))])


def test_all_blocks_of_a_request_count() -> None:
    known = accounts()
    alone = known.of({BLOCK_ARG: encoded(READS)})
    assert alone.computes
    assert alone.reads == frozenset({"model.model.layers.0.output"})
    beside = known.of({BLOCK_ARG: encoded(READS), EDITS_ARG: standing(WRITES)})
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


L1 = "model.model.layers.1.output"
ADDS = "h = model.model.layers[1].output[0]\nh += by['a']\n"
VECTORS = pack({"by": {"a": np.ones(4, np.float32), "text": "x"}, "matrix": np.ones((2, 2), np.float32)})


def test_a_block_whose_edits_are_known_counts_as_one_that_only_reads() -> None:
    block = {BLOCK_ARG: encoded(READS + WRITES)}
    found = accounts(edits=True).of(block)
    assert found.known is not None
    assert [edit.location for edit in found.known] == [L1]
    assert found.reads == found.asks == frozenset({"model.model.layers.0.output", L1})
    assert found.computes
    assert found.keeps
    waited = accounts().of(block)
    assert (waited.known, waited.reads, waited.keeps) == (None, None, False)


def test_a_block_that_changes_its_own_arrays_does_not_keep_what_it_saves() -> None:
    total = "total = 0\nfor step in tracer.iter[:]:\n    l = model.logits\n    l *= 2.0\n    total += l.sum()\n"
    found = accounts(edits=True).of({BLOCK_ARG: encoded(total)})
    assert found.known is not None
    assert not found.keeps


def test_a_block_that_only_reads_has_no_edits_to_know() -> None:
    found = accounts(edits=True).of({BLOCK_ARG: encoded(READS)})
    assert (found.known, found.reads) == (None, frozenset({"model.model.layers.0.output"}))
    assert found.keeps


@pytest.mark.parametrize("source", [READS, WRITES])
def test_edits_are_left_to_the_blocks_beside_a_standing_intervention(source: str) -> None:
    known = accounts(edits=True)
    found = known.of({BLOCK_ARG: encoded(WRITES), EDITS_ARG: standing(source)})
    assert (found.known, found.reads, found.keeps) == (None, None, False)
    assert found.computes
    # Alone, one counts as a block of a request does.
    alone = known.of({EDITS_ARG: standing(WRITES)})
    assert alone.known is not None
    assert alone.reads == frozenset({L1})


@pytest.mark.parametrize(
    ("leaf", "known"), [("by['a']", True), ("by['text']", False), ("by['b']", False), ("matrix", False), ("by", False)]
)
def test_edits_with_another_leaf_than_a_vector_are_left_to_the_block(leaf: str, known: bool) -> None:
    source = ADDS.replace("by['a']", leaf)
    found = accounts(edits=True).of({BLOCK_ARG: encoded(source, variables=VECTORS)})
    assert (found.known is not None, found.reads is not None, found.keeps) == (known, known, known)
    assert found.computes


def test_a_block_whose_edits_are_not_known_is_waited_for() -> None:
    found = accounts(edits=True).of({BLOCK_ARG: encoded("l = model.logits\nif l.sum() > 1:\n    l *= 2.0\n")})
    assert (found.known, found.reads, found.keeps) == (None, None, False)
    assert found.computes


def test_edits_of_a_location_can_be_left_to_the_blocks_from_then_on() -> None:
    known, block, other = accounts(edits=True), {BLOCK_ARG: encoded(WRITES)}, "model.logits[:, 7] += 2.0\n"
    before = known.of(block)
    known.leave(L1)
    found = known.of(block)
    assert before.known is not None
    assert (found.known, found.reads, found.keeps) == (None, None, False)
    assert found.edits == before.edits == frozenset({L1})
    assert known.of({BLOCK_ARG: encoded(other)}).known is not None
    # One that also edits another location is left to the block as a whole.
    assert known.of({BLOCK_ARG: encoded(WRITES + other)}).known is None
    # The location may be read.
    reads = "x = model.model.layers[1].output[0].clone().save()\n"
    assert known.of({BLOCK_ARG: encoded(reads + other)}).known is not None


@pytest.mark.parametrize("argument", [BLOCK_ARG, EDITS_ARG])
def test_the_leaves_of_edits_are_those_of_the_only_block(argument: str) -> None:
    block = encoded(ADDS, variables=VECTORS)
    arguments = {BLOCK_ARG: block}
    if argument == EDITS_ARG:
        arguments = {EDITS_ARG: msgspec.msgpack.encode([EditBlock(name="edit", block=msgspec.Raw(block))])}
    found = accounts(edits=True).of(arguments)
    assert found.known is not None
    (leaf,) = known_leaves(arguments, found.known, {})
    assert leaf.tolist() == [1.0] * 4


def test_edits_that_would_hold_too_much_are_left_to_the_block() -> None:
    source = "model.model.layers[1].output[0][:] += v * 2.0\n"
    block = {BLOCK_ARG: encoded(source, variables=pack({"v": np.ones(8, np.float32)}))}
    known = accounts(edits=True)
    found = known.of(block)
    # The vector, and its product, of which the dtype might be wider.
    assert (found.reads, found.held) == ({"model.model.layers.1.output"}, 32 + 64)
    assert known.of(block, 96).reads is not None
    left = known.of(block, 95)
    assert (left.reads, left.known, left.keeps) == (None, None, False)
