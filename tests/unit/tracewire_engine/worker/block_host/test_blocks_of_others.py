"""A rank without hosts knows the requests with blocks, and puts in what another one's hosts leave."""

from __future__ import annotations

import msgspec
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.link.shared_rows import RowBytes
from tracewire_engine.protocol.block_host import Reply, Shape
from tracewire_engine.worker.block_host.blocks_of_others import BlocksOfOthers, with_edits
from tracewire_engine.worker.block_host.rank_link import Edit
from tracewire_engine.worker.block_host.rows import StepSpans


def test_it_knows_its_requests_and_ends_none() -> None:
    others = BlocksOfOthers()
    others._by_request["a-0"] = "a"
    assert len(others) == 1
    assert (others.fail("a-0", Failure("", "")), others.fail("b-0", Failure("", ""))) == (True, False)
    found = [others.take_result(msgspec.msgpack.encode([name])) for name in ("a", "b")]
    assert found == [True, False]


def test_edits_are_put_in_and_those_that_do_not_fit_are_told() -> None:
    data = RowBytes(torch.full((4,), 7.0).view(torch.uint8))
    fits = Edit(["a"], StepSpans([(1, 1)], [1], 2, 2), Reply(edited=[(0, Shape("float32", (1, 4), 0))]))
    wrong = Edit(["b"], StepSpans([(0, 1)], [0], 2, 2), Reply(edited=[(3, Shape("float32", (1, 4), 0))]))
    failed = []
    value = with_edits(torch.zeros(2, 4), [fits, wrong], data, lambda edit, _: failed.append(edit), by_request=False)
    assert value.tolist() == [[0.0] * 4, [7.0] * 4]
    assert failed == [wrong]
