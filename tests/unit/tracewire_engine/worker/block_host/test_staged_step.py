"""Rows of what a step reaches, copied once for all hosts that only read."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from nnsight.intervention.source import NO_SKIP

from tests.support.hosted_model import HostedModel
from tracewire_engine.link.shared_rows import RowMemory, SharedValueError, unpack_value
from tracewire_engine.protocol.block_host import Reached
from tracewire_engine.worker.block_host import staged_reads, staged_step
from tracewire_engine.worker.block_host.host import LateTurn, _ToldStep
from tracewire_engine.worker.block_host.row_buffer import RowBuffer
from tracewire_engine.worker.block_host.rows import StepRows
from tracewire_engine.worker.block_host.staged_step import HostRows, StagedStep, StageLayout

#: Tokens 0, 3 and 4 of six for one host, and token 1 for the other; of the requests 0 and 2, and 1.
ONE, OTHER = StepRows([(0, 1), (3, 2)], [0, 2], 6, 4), StepRows([(1, 1)], [1], 6, 4)

VALUES: list[Any] = [
    (torch.arange(12.0).view(6, 2), torch.arange(12).view(1, 6, 2)),
    [torch.arange(12.0).view(2, 6).T, {"requests": torch.arange(8, dtype=torch.bfloat16).view(4, 2)}],
    (torch.ones(7), torch.empty(6, 0), torch.tensor(3.0), "text", None, NO_SKIP, object()),
]


def numbered(value: Any, memory: RowMemory) -> Any:
    return unpack_value(value, lambda _, shape: memory.read(shape), lambda other: other)


def cut(value: Any, rows: StepRows, *, rows_only: bool) -> Any:
    """A host's part of a value, cut out by its spans."""
    others = 0

    def part(one: Any) -> Any:
        nonlocal others
        if isinstance(one, torch.Tensor):
            place = rows.of(one, by_request=False)
            if place is not None:
                return torch.cat([one.narrow(place[0], *span) for span in place[1]], dim=place[0])
            if not rows_only:
                return one
        if isinstance(one, tuple | list):
            return type(one)([part(item) for item in one])
        if isinstance(one, dict):
            return {key: part(item) for key, item in one.items()}
        if one is None or one is NO_SKIP or isinstance(one, str):
            return None if one is NO_SKIP else one
        others += 1
        return [others - 1, "Withheld" if isinstance(one, torch.Tensor) else type(one).__name__]

    return part(value)


def staged(values: list[Any], *, rows_only: bool = False) -> StagedStep:
    step = StagedStep(StageLayout({"one": ONE, "other": OTHER}), pinned=False)
    for place, value in enumerate(values):
        hosts = ["one", "other"] if place != 1 else ["one"]
        step.reach(f"at.{place}", value, hosts, 2 * place, by_request=False, rows_only=rows_only)
    step.seal()
    return step


def given(step: StagedStep, host: str, rows: StepRows, memory: RowMemory) -> list[Reached]:
    share, told, before = step.share_of(host), [], 0
    for readings in share.parts():
        found = share.give(readings, memory)
        assert found is not None
        start, late = found
        assert late.done
        late.arrive(memory)
        told += share.events(readings, start, array("H", range(9)), before)
        before = readings[-1].passed + 1
    return told


@pytest.mark.parametrize("rows_only", [False, True])
def test_each_host_gets_its_rows_of_all_values(rows_only: bool) -> None:
    step = staged(VALUES, rows_only=rows_only)
    for host, rows in (("one", ONE), ("other", OTHER)):
        memory = RowMemory.create(1 << 16)
        told = given(step, host, rows, memory)
        assert [event.location for event in told] == (["at.0", "at.1", "at.2"] if host == "one" else ["at.0", "at.2"])
        for event in told:
            value = VALUES[int(event.location[-1])]
            assert repr(numbered(event.value, memory)) == repr(cut(value, rows, rows_only=rows_only))
    # What the model passed between two values, which hosts count themselves.
    one = given(step, "other", OTHER, RowMemory.create(1 << 16))
    assert [array("H", event.passed).tolist() for event in one] == [[], [1, 2, 3]]


def test_a_value_that_changes_later_is_as_it_was() -> None:
    value = torch.arange(12.0).view(6, 2)
    step = staged([value])
    value.zero_()
    memory = RowMemory.create(1 << 16)
    (told,) = given(step, "other", OTHER, memory)
    assert numbered(told.value, memory).tolist() == [[2.0, 3.0]]


def test_values_of_one_form_are_copied_together() -> None:
    layers = [torch.full((6, 8), float(layer)) for layer in range(20)]
    step = StagedStep(StageLayout({"one": ONE}), pinned=False)
    for layer, value in enumerate(layers):
        step.reach(f"at.{layer}", (value, value + 0.5), ["one"], layer, by_request=False, rows_only=False)
    share, memory = step.share_of("one"), RowMemory.create(1 << 16)
    (readings,) = share.parts()
    found = share.give(readings, memory)
    assert found is not None
    start, late = found
    assert len(late._pieces) == 1
    late.arrive(memory)
    for layer, event in enumerate(share.events(readings, start, array("H", range(20)), 0)):
        hidden, more = numbered(event.value, memory)
        assert hidden.tolist() == [[layer] * 8] * 3
        assert more.tolist() == [[layer + 0.5] * 8] * 3


def test_items_that_no_host_uses_are_not_copied() -> None:
    memory = RowMemory.create(1 << 16)
    value = (torch.ones(6, 3), torch.arange(12.0).view(6, 2), torch.zeros(6, 500))
    step = StagedStep(StageLayout({"one": ONE, "other": OTHER}), pinned=False)
    for at in range(2):
        step.reach(f"at.{at}", value, ["one", "other"], at, by_request=False, parts=frozenset({1, 7}))
    step.reach("at.2", value[1], ["one"], 2, by_request=False, parts=frozenset({0}))
    assert step.size == 3 * 64
    told = given(step, "one", ONE, memory)
    first, second, rows = numbered(told[0].value, memory)
    assert (first, rows) == ([0, "Withheld"], [1, "Withheld"])
    assert second.tolist() == value[1][[0, 3, 4]].tolist()
    # A value that is a tensor has rows, and no items.
    assert numbered(told[2].value, memory).tolist() == value[1][[0, 3, 4]].tolist()


def test_what_is_too_much_for_one_message_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_step, "_TOLD", 128)
    step = StagedStep(StageLayout({"one": ONE}), pinned=False)
    for layer in range(5):
        step.reach(f"at.{layer}", torch.zeros(6, 4), ["one"], layer, by_request=False, rows_only=False)
    share = step.share_of("one")
    assert [len(part) for part in share.parts()] == [2, 2, 1]
    # A memory that has no room for a part yet.
    assert share.give(share.parts()[0], RowMemory.create(64)) is None


def compared(
    layout: StageLayout, values: list[Any], *, passed: int = 1, hosts: tuple[str, ...] = ("one",)
) -> StagedStep:
    """A step of a layout that was compared with the one before."""
    step = StagedStep(layout, pinned=False)
    for place, value in enumerate(values):
        step.reach(f"at.{place}", value, list(hosts), passed * place, by_request=False, rows_only=False)
    step.compare()
    step.seal()
    return step


def test_a_step_like_the_one_before_gives_a_host_the_same_rows() -> None:
    layout, memory = StageLayout({"one": ONE, "other": OTHER}), RowMemory.create(1 << 16)
    steps = []
    for number in range(3):
        step = compared(layout, [(torch.arange(12.0).view(6, 2) + number, torch.arange(6) * number)] * 2)
        assert (step.share_of("one").given is not None) == bool(number)
        steps.append((step, given(step, "one", ONE, memory)))
    for number, (_, told) in enumerate(steps):
        for event in told:
            hidden, ids = numbered(event.value, memory)
            assert hidden.tolist() == [
                [number, number + 1.0],
                [6.0 + number, 7.0 + number],
                [8.0 + number, 9.0 + number],
            ]
            assert ids.tolist() == [0, 3 * number, 4 * number]


def test_a_step_that_differs_is_not_like_the_one_before() -> None:
    layout, memory = StageLayout({"one": ONE, "other": OTHER}), RowMemory.create(1 << 16)
    values = [torch.zeros(6, 2), torch.zeros(6, 3)]

    def is_like(values: list[Any], **how: Any) -> bool:
        step = compared(layout, values, **how)
        like = step.share_of("one").given is not None
        given(step, "one", ONE, memory)
        return like

    assert not is_like(values)
    assert is_like(values)
    assert not is_like(values[:1])
    assert not is_like(values)
    assert not is_like([values[0], torch.zeros(6, 3, dtype=torch.int32)])
    assert not is_like(values)
    assert not is_like(values, passed=2)
    assert not is_like(values, hosts=("one", "other"))
    # 1 equals True, but is another value.
    assert not is_like([(values[0], 1)])
    assert not is_like([(values[0], True)])


def test_memory_is_used_again_when_all_have_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowBuffer, "_free", {})
    step = staged(VALUES[:1])
    buffer, memory = step._buffers[0], RowMemory.create(1 << 16)
    shares = [step.share_of("one"), step.share_of("other")]
    late: list[HostRows] = []
    for share in shares:
        found = share.give(share.parts()[0], memory)
        assert found is not None
        late.append(found[1])
    step.leave()
    for rows in late:
        assert RowBuffer._free == {}
        rows.arrive(memory)
    assert staged(VALUES[:1])._buffers[0] is buffer


def test_a_value_that_cannot_be_shared_is_refused() -> None:
    deep: Any = torch.zeros(6)
    for _ in range(20):
        deep = [deep]
    with pytest.raises(SharedValueError, match="deeper"):
        staged([deep])


def test_a_step_with_more_than_is_staged_is_told_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_reads, "_MOST_STAGED", 64)
    source = "kept = [].save()\nfor step in tracer.iter[:]:\n" + "".join(
        f"    kept.append(model.model.layers[{layer}].output[0].clone())\n" for layer in range(3)
    )
    model = HostedModel()
    few = model.run({"a": source, "b": source}, steps=3)
    monkeypatch.undo()
    many = model.run({"c": source, "d": source}, steps=3)
    for one, other in zip(few.values(), many.values(), strict=True):
        assert repr(one.saves) == repr(other.saves)
        assert len(one.saves["kept"]) == 9
    model.close()


def test_a_step_like_the_one_before_that_cannot_be_shared_costs_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise SharedValueError("no such value")

    model = HostedModel()
    for name in ("a", "b"):
        model.open(name, "kept = model.model.layers[1].output[0].clone().save()\n", tenant=name)
    model.step({"a": 1, "b": 1}, 0)
    monkeypatch.setattr(model.hosts.traces["a"].host, "read_again", broken)
    model.step({"a": 1, "b": 1}, 1)
    for name in ("a", "b"):
        model.finish(name, 2)
    model.wait("a", "b")
    failed, other = model.outcomes["a"].finish, model.outcomes["b"].finish
    assert failed is not None
    assert failed.error is not None
    assert "model.model.layers.1.output cannot be shared: SharedValueError: no such value" in failed.error.message
    assert other is not None
    assert other.error is None
    model.close()


def test_a_value_that_cannot_be_shared_costs_the_hosts_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = StagedStep.reach

    def broken(self: StagedStep, location: str, *given: Any, **more: Any) -> None:
        if location == "model.model.layers.1.output":
            raise SharedValueError("no such value")
        reach(self, location, *given, **more)

    monkeypatch.setattr(StagedStep, "reach", broken)
    reads = "for step in tracer.iter[:]:\n    kept = model.model.layers[{}].output[0].clone().save()\n"
    model = HostedModel()
    for name, layer in (("a", 1), ("b", 2)):
        model.open(name, reads.format(layer), tenant=name)
    for index in range(3):
        model.step({"a": 1, "b": 1}, index)
    for name in ("a", "b"):
        model.finish(name, 3)
    model.wait("a", "b")
    failed, other = model.outcomes["a"].finish, model.outcomes["b"].finish
    assert failed is not None
    assert failed.error is not None
    assert "model.model.layers.1.output cannot be shared: SharedValueError: no such value" in failed.error.message
    assert other is not None
    assert other.error is None
    model.close()


def test_turns_whose_rows_come_late_are_sent_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedStep, "done", property(lambda step: False))
    reads = (
        "hidden = [].save()\nfor step in tracer.iter[:]:\n    hidden.append(model.model.layers[1].output[0].clone())\n"
    )
    writes = reads + "    model.model.layers[2].output[0][:] = 0\n"
    caches = "cache = tracer.cache(modules=[model.model.layers[0]])\n" + writes
    model = HostedModel()
    found = model.run({"reads": reads, "writes": writes, "caches": caches, "again": reads}, steps=5)
    for one in found.values():
        assert one.finish is not None
        assert one.finish.error is None
        assert len(one.saves["hidden"]) == 5
    assert (found["reads"].saves["hidden"][4] != 0).any()
    model.close()


CACHED = """
cache = tracer.cache(modules=[model.model.layers[2]]).save()
model.model.layers[0].output[0][:] = 0.5
"""


def run_alone(model: HostedModel, block: str, steps: int) -> None:
    """Run a block in so many steps without other requests, and close the model."""
    try:
        model.open("a", block)
        for number in range(steps):
            model.step({"a": 1 if number else 2}, number)
        model.finish("a", steps)
        model.wait("a")
    finally:
        model.close()


def test_the_model_does_not_wait_for_rows_as_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that has written, and whose cache goes on, wants rows that nobody waits for."""
    waited: list[str] = []
    phase = ["model"]
    monkeypatch.setattr(StagedStep, "done", property(lambda step: step in arrived))
    arrived: set[Any] = set()

    def wait(step: StagedStep) -> None:
        arrived.add(step)
        if threading.current_thread() is threading.main_thread():
            waited.append(phase[0])

    monkeypatch.setattr(StagedStep, "wait", wait)
    model = HostedModel()
    begin = model._begin

    def begun(*given: Any) -> Any:
        phase[0] = "begin"
        try:
            return begin(*given)
        finally:
            phase[0] = "model"

    monkeypatch.setattr(model, "_begin", begun)
    run_alone(model, CACHED, 8)
    assert set(waited) <= {"model"}
    assert len(model.outcomes["a"].saves["cache"]) == 1


def test_hosts_that_the_model_waits_for_begin_a_step_before_that() -> None:
    model = HostedModel()
    turns: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patched:
        send = LateTurn.send

        def sent(turn: LateTurn) -> None:
            turns.append([type(event).__name__ for event in turn._turn.events])
            send(turn)

        patched.setattr(LateTurn, "send", sent)
        run_alone(model, "for _ in tracer.iter[:]:\n    model.model.layers[1].output[0][:] *= 2.0", 4)
    # `Began` of later steps is not in the turn that the model waits for.
    assert ["Reached"] in turns[2:]
    assert not any({"Began", "Reached"} <= set(turn) for turn in turns[2:])


def test_hosts_are_told_of_steps_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[bool] = []
    repeats = _ToldStep.repeats

    def noted(self: _ToldStep, *given: Any) -> bool:
        repeated.append(repeats(self, *given))
        return repeated[-1]

    monkeypatch.setattr(_ToldStep, "repeats", noted)
    source = "kept = [].save()\nfor step in tracer.iter[:]:\n    kept.append(model.model.layers[1].output[0].clone())\n"
    model = HostedModel()
    try:
        told = model.run({"a": source, "b": source}, steps=6)
        # The first step has two tokens of each request, and the second one token.
        assert repeated == [True] * 4
        monkeypatch.setattr(_ToldStep, "repeats", lambda self, *given: False)
        whole = model.run({"c": source, "d": source}, steps=6)
    finally:
        model.close()
    for one, other in zip(told.values(), whole.values(), strict=True):
        assert len(one.saves["kept"]) == 6
        assert all(map(np.array_equal, one.saves["kept"], other.saves["kept"]))
        assert len({str(kept) for kept in one.saves["kept"][1:3]}) == 2
