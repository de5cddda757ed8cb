"""What the first rank tells the others: in order, with the bytes of tensors, and what all ranks count alike."""

from __future__ import annotations

import torch

from tests.support.hosted_ranks import linked
from tracewire_engine.link.shared_rows import CopiedRows, RowMemory
from tracewire_engine.protocol.block_host import Reply, Shape, Shared
from tracewire_engine.worker.block_host.rank_link import Called, Served, StepBegan, StepWatch, edit_of
from tracewire_engine.worker.block_host.rows import StepRows


def test_messages_arrive_in_order_with_their_tensors() -> None:
    first, second = linked()
    assert (first.first, second.first) == (True, False)
    memory, copies = RowMemory.create(1 << 16), CopiedRows()
    tensors = [torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.tensor(True), torch.empty(0, 4)]
    shapes = []
    for tensor in tensors:
        start = memory.room(tensor.nbytes)
        assert start is not None
        memory.write(tensor, start)
        shapes.append(Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
    reply = Reply(edited=[(0, shapes[0])], replaced=Shared([1, [0, 0], [0, 1]], shapes[1:]))
    edit = edit_of({"b", "a"}, StepRows([(0, 1), (3, 1)], [0, 2], 5, 3), reply, memory, copies)
    # What the host writes there later is nobody's.
    memory.write(torch.ones(2, 3, dtype=torch.bfloat16), shapes[0].start)
    first.tell(StepBegan(StepWatch({"x": 1}, {"y"})))
    first.tell(Served([edit]), copies.bytes())
    first.tell(Called("model.lm_head", Shared([1, [1], [3]])))
    began, _ = second.hear()
    assert began == StepBegan(StepWatch({"x": 1}, {"y"}))
    served, rows = second.hear()
    assert served == Served([edit])
    assert edit.requests == ["a", "b"]
    assert StepRows(*edit.rows).of(torch.zeros(5), by_request=False) == (0, [(0, 1), (3, 1)])
    found = [rows.read(edit.reply.edited[0][1]), *map(rows.read, edit.reply.replaced.tensors)]
    assert [one.tolist() for one in found] == [one.tolist() for one in tensors]
    called, _ = second.hear()
    assert called.path == "model.lm_head"
    for link in (first, second):
        link.close()


def test_a_step_has_a_message_if_a_request_with_blocks_is_in_it() -> None:
    first, second = linked()
    first.requests |= {"a", "b"}
    assert first.takes_part({"b": 1, "plain": 1})
    assert not first.takes_part({"plain": 1})
    for link in (first, second):
        link.close()


def test_what_is_watched_is_counted() -> None:
    watch = StepWatch({"x": 1, "y": 0}, {"z"})
    assert [place in watch for place in "xyzw"] == [True, True, True, False]
    assert [watch.due(place) for place in "xyzw"] == [False, True, True, False]
    assert [watch.passes(place) for place in "xyzw"] == [False, True, False, False]
    assert watch.due("x")
    assert watch.passes("x")
