"""How values travel between pipeline stages."""

from __future__ import annotations

import pytest
import torch

from tracewire_bus.wire.messages import Failure
from tracewire_engine.worker.parallel.plain_messages import Tensors, unpacked
from tracewire_engine.worker.parallel.stage_exchange import Message, Pipeline, StageUpdate, _decoded, _encoded
from tracewire_engine.worker.parallel.staged_mediator import Entry


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_values_travel_whole(dtype: torch.dtype) -> None:
    tensor = torch.arange(15).reshape(3, 5).to(dtype)
    value = [
        Entry("VALUE", "a", 0, (tensor[:, 1:3], None, {"x": tensor[0, 0], "n": 7})),
        Entry("SWAP", "b", 3, tensor[:0]),
    ]
    failure = Failure(type="ValueError", message="no", line=3)
    update = StageUpdate("r", {"": value}, True, {"edit": failure})
    sent = Message([update], [(1, 2, [("r", 0, 3)], tensor)], {"q": failure})
    tensors = Tensors()
    data = _encoded(sent, tensors)
    back = _decoded(data, unpacked(tensors.table, tensors.bytes(), torch.device("cpu")))
    (update,) = back.updates
    assert (update.request, update.ended, update.errors) == ("r", True, {"edit": failure})
    assert back.failures == {"q": failure}
    ((order, site, members, rows),) = back.read
    assert (order, site, members) == (1, 2, [("r", 0, 3)])
    assert torch.equal(rows, tensor)
    first, second = update.logs[""]
    assert isinstance(first, Entry)
    assert torch.equal(first.value[0], tensor[:, 1:3])
    assert first.value[0].dtype == dtype
    assert first.value[1] is None
    assert torch.equal(first.value[2]["x"], tensor[0, 0])
    assert first.value[2]["n"] == 7
    assert second.value.shape == (0, 5)


def test_what_cannot_be_sent_is_left_out_by_name() -> None:
    good, bad = [Entry("VALUE", "a", 0, torch.ones(3))], [Entry("VALUE", "b", 0, lambda: None)]
    kept = Pipeline._sendable(StageUpdate("r", {"": good, "edit": bad}, False, {}))
    assert kept.logs == {"": good}
    assert list(kept.errors) == ["edit"]
    assert "cannot be sent to other pipeline stages" in kept.errors["edit"].message
