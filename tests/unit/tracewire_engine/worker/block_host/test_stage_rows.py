"""Values travel between stages with the rows of requests with blocks, whatever they are made of."""

from __future__ import annotations

from array import array

import torch
from nnsight.intervention.source import NO_SKIP

from tracewire_engine.link.shared_rows import RowBytes
from tracewire_engine.worker.block_host.reading import Account
from tracewire_engine.worker.block_host.rows import StepRows
from tracewire_engine.worker.block_host.stage_rows import (
    HostedRequests,
    Names,
    Pieces,
    named,
    packed,
    unpacked,
)

ROWS = StepRows([(1, 2), (5, 1)], [1, 3], 6, 4)


class Mask:
    pass


def test_a_value_arrives_with_the_rows_of_requests_with_blocks() -> None:
    hidden = torch.randn(6, 3).to(torch.bfloat16)
    value = (
        (hidden, None),
        {"positions": torch.arange(18).view(1, 6, 3), "scale": torch.tensor(2.0), "k": [True, 1.5]},
    )
    pieces = Pieces()
    shared = packed((*value, Mask(), NO_SKIP, torch.empty(6, 0), torch.arange(7)), ROWS, pieces)
    # What the model does to the value later is nobody's.
    before = hidden.clone()
    hidden.zero_()
    data = RowBytes(torch.frombuffer(pieces.bytes(), dtype=torch.uint8))
    (found, nothing), named_, mask, skip, empty, other = unpacked(shared, ROWS, data)
    assert (nothing, type(mask).__name__, skip is NO_SKIP, empty.shape) == (None, "Mask", True, (6, 0))
    assert (found.dtype, found.shape) == (torch.bfloat16, (6, 3))
    for rows in (slice(1, 3), slice(5, 6)):
        assert torch.equal(found[rows], before[rows])
        assert torch.equal(named_["positions"][:, rows], value[1]["positions"][:, rows])
    assert (float(named_["scale"]), named_["k"], other.tolist()) == (2.0, [True, 1.5], list(range(7)))


def test_all_stages_count_the_rows_of_the_same_requests() -> None:
    requests = HostedRequests()
    requests.add("reads", Account(reads=frozenset({"x"}), computes=True))
    assert requests.rows_of({"other": 2}, ["other"]) is None
    scheduled = {"other": 2, "reads": 3, "writes": 1}
    assert not requests.wait_in(scheduled)
    requests.add("writes", Account())
    assert requests.wait_in(scheduled)
    assert not requests.wait_in({"reads": 1})
    rows = requests.rows_of(scheduled, ["writes", "gone", "other", "reads"])
    assert rows is not None
    assert rows.of(torch.zeros(6), by_request=False) == (0, [(0, 1), (3, 3)])
    assert requests.reads_in(scheduled) == {"x"}
    requests.discard("writes")
    requests.discard("reads")
    assert requests.rows_of(scheduled, list(scheduled)) is None


def test_a_name_travels_once() -> None:
    names, told = Names(), list[str]()
    assert [names.place(one) for one in "abab"] == [0, 1, 0, 1]
    told += names.take()
    assert (names.place("c"), names.take(), names.take()) == (2, ["c"], [])
    assert named(array("H", [1, 0]).tobytes(), told) == ["b", "a"]
