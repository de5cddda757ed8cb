"""A host's loop, on a thread: turns are answered, and acknowledged."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from nnsight.tracing.tracer import inc

from tests.support.hosted_model import Model, settings_of
from tracewire_bus.wire.messages import Block
from tracewire_engine.block_host import driver
from tracewire_engine.block_host.driver import Driver
from tracewire_engine.link.host_channel import HostChannel
from tracewire_engine.link.shared_rows import RowMemory, pack_value
from tracewire_engine.protocol.block_host import (
    Answer,
    Arrived,
    Began,
    Chunk,
    EditsFailed,
    Ended,
    Finished,
    Reached,
    Reply,
    Report,
    Reported,
    Request,
    Saved,
    Shape,
    Turn,
)
from tracewire_engine.protocol.keys import BLOCK_ARG
from tracewire_engine.protocol.messages import StepRecord
from tracewire_engine.worker.blocks import save_marks, time_limit

ID, WHERE = "r-00000000", "model.model.layers.0.output"
_said: msgspec.msgpack.Decoder[Reply | Request] = msgspec.msgpack.Decoder(Reply | Request)


class Hosted:
    """The worker's ends of a driver that runs on a thread."""

    def __init__(self, **settings: Any) -> None:
        (calls, their_calls), (reports, their_reports) = socket.socketpair(), socket.socketpair()
        saves, their_saves = socket.socketpair()
        self.calls, self.reports, self.saves = HostChannel(calls), HostChannel(reports), HostChannel(saves)
        self.given, self.returned = RowMemory.create(1 << 20), RowMemory.create(1 << 20)
        ends = HostChannel(their_calls), HostChannel(their_reports), HostChannel(their_saves)
        self._driver = Driver(settings_of(Model(2), **settings), *ends, self.given, self.returned)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        inc()
        save_marks.install()
        try:
            self._driver.run()
        except BaseException as error:
            self.error = error
        finally:
            # A host's process ends here. This one runs other tests.
            time_limit.limit_together(None)

    def turn(self, *events: Any, waits: bool = True, mark: int = 0) -> Reply | Request | None:
        self.calls.send(msgspec.msgpack.encode(Turn(list(events), waits, [], mark)))
        return _said.decode(self.calls.receive(30)) if waits else None

    def reached(self, source: str, tensor: torch.Tensor) -> tuple[Began, Reached]:
        block = msgspec.msgpack.encode(Block(name="b", source=source))

        def write(one: torch.Tensor) -> Shape:
            start = self.given.room(one.nbytes)
            assert start is not None
            self.given.write(one, start)
            return Shape("float32", tuple(one.shape), start)

        value = pack_value((tensor, tensor), write, lambda _: None)
        return Began([Arrived(ID, {BLOCK_ARG: block})], [(ID, len(tensor), 0)]), Reached(WHERE, value)

    def received(self) -> Report:
        report: Report = msgspec.msgpack.decode(self.reports.receive(30), type=Report)
        return report

    def reported(self) -> Reported:
        report = self.received()
        assert isinstance(report, Reported)
        return report

    def saved(self) -> list[StepRecord]:
        """The records of the next message to the save relay."""
        saved: Saved = msgspec.msgpack.decode(self.saves.receive(30), type=Saved)
        return saved.steps

    def stop(self) -> None:
        self.calls.close()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    one = Hosted()
    yield one
    one.stop()


def test_a_turn_is_answered_with_what_the_blocks_changed(hosted: Hosted) -> None:
    began, reached = hosted.reached("h = model.model.layers[0].output\nh[1][0] = 5", torch.zeros(2, 4))
    reply = hosted.turn(began, reached)
    assert isinstance(reply, Reply)
    assert reply.waits == []
    assert [index for index, _ in reply.edited] == [1]
    assert hosted.returned.read(reply.edited[0][1])[:, 0].tolist() == [5, 0]
    assert hosted.error is None
    # A reply says as much as a report without saves would.
    hosted.turn(Ended(b""), waits=False, mark=640)
    report = hosted.reported()
    assert (report.turns, report.mark, report.steps) == (2, 640, [])
    assert len(hosted.saved()) == 1


def test_a_host_with_nothing_else_to_report_says_how_far_it_is_after_several_turns(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_UNTOLD_S", 60.0)
    part = hosted.given.size // 8
    for mark in (64, part, part + 64, part + 128):
        hosted.turn(Ended(b""), waits=False, mark=mark)
    report = hosted.reported()
    assert (report.turns, report.mark) == (3, part + 64)
    # A reply says it, too.
    hosted.turn(waits=True, mark=2 * part + 128)
    hosted.turn(Ended(b""), waits=False, mark=2 * part + 192)
    hosted.turn(Ended(b""), waits=False, mark=3 * part + 192)
    report = hosted.reported()
    assert (report.turns, report.mark) == (7, 3 * part + 192)


def test_a_host_says_how_long_steps_take_in_which_no_request_begins_or_ends(hosted: Hosted) -> None:
    source = "kept = [].save()\nfor _ in tracer.iter[:]:\n    kept.append(model.model.layers[0].output[0].clone())"
    began, reached = hosted.reached(source, torch.zeros(2, 512))
    hosted.turn(began, reached, Ended(b""), waits=False)
    used = [hosted.reported().used_us]
    for index in (1, 2):
        hosted.turn(Began([], [(ID, 2, index)]), reached, Ended(b""), waits=False)
        used.append(hosted.reported().used_us)
    hosted.turn(Began([], [(ID, 2, 3)]), reached, Ended(b""), Finished(ID, 4), waits=False)
    last = hosted.reported()
    assert len(last.finishes) == 1
    assert [one > 0 for one in (*used, last.used_us)] == [False, True, True, False]


def test_what_is_replaced_comes_back_whole(hosted: Hosted) -> None:
    source = "o = model.model.layers[0].output\nmodel.model.layers[0].output = (o[0] + 1, o[1])"
    reply = hosted.turn(*hosted.reached(source, torch.zeros(2, 4)))
    assert isinstance(reply, Reply)
    assert reply.replaced is not None
    assert reply.edited == []
    assert hosted.returned.read(reply.replaced.tensors[0]).tolist() == [[1.0] * 4] * 2


def test_a_block_asks_the_worker_and_may_be_refused(hosted: Hosted) -> None:
    source = "h = model.model.layers[0].output\ntry:\n    model.model.norm(h[0])\nexcept KeyError:\n    pass"
    asked = hosted.turn(*hosted.reached(source, torch.zeros(2, 4)))
    assert isinstance(asked, Request)
    assert (asked.path, asked.attribute) == ("model.model.norm", "")
    hosted.calls.send(msgspec.msgpack.encode(Answer(error=("KeyError", "no"))))
    assert isinstance(_said.decode(hosted.calls.receive(30)), Reply)


def test_a_change_that_comes_too_late_ends_the_host(hosted: Hosted) -> None:
    """A block whose source was wrongly taken to only read."""
    hosted.turn(*hosted.reached("model.model.layers[0].output[0][:] = 1", torch.zeros(2, 4)), waits=False)
    hosted._thread.join(30)
    assert isinstance(hosted.error, RuntimeError)
    assert "another way than its source was taken to" in str(hosted.error)


@pytest.mark.parametrize(
    ("source", "over"),
    [
        ("x = [][model.model.layers[0].output[0].shape[0]]", True),
        ("for _ in tracer.iter[:]:\n    x = model.model.layers[0].output[0].clone()", False),
    ],
)
def test_a_block_whose_edits_the_worker_could_not_do_must_have_failed(hosted: Hosted, source: str, over: bool) -> None:
    hosted.turn(*hosted.reached(source, torch.zeros(2, 4)), waits=False)
    hosted.turn(Ended(), EditsFailed([ID]), waits=False)
    if over:
        assert hosted.turn(Began([], [])) is not None
    else:
        hosted._thread.join(30)
        assert "another way than its source was taken to" in str(hosted.error)


def two_steps(host: Hosted) -> Turn:
    """A turn that two were joined in: each a step in which a block reads a layer."""
    source = (
        "kept = [].save()\nfor step in tracer.iter[:]:\n    kept.append(model.model.layers[0].output[0][-1].clone())"
    )
    began, reached = host.reached(source, torch.ones(2, 4))
    _, again = host.reached(source, torch.ones(1, 4))
    events = [began, reached, Ended(), Began([], [(ID, 1, 1)]), again, Ended()]
    return Turn(events, mark=host.given.taken, turns=2)


def test_each_step_of_a_turn_has_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []
    monkeypatch.setattr(time_limit, "limit_together", given.append)
    host = Hosted()
    host.calls.send(msgspec.msgpack.encode(two_steps(host)))
    # One message of both steps, and one report of both turns.
    assert [step.index for step in host.saved()] == [0, 1]
    assert host.reported().turns == 2
    host.stop()
    assert host.error is None
    limit = given[0]
    assert limit
    assert given[:3] == [limit] * 3


def test_if_the_first_step_of_a_turn_takes_long_it_is_reported_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_SLOW_S", -1.0)
    host = Hosted()
    turn = two_steps(host)
    host.calls.send(msgspec.msgpack.encode(turn))
    reports = [host.reported(), host.reported()]
    saved = [host.saved(), host.saved()]
    host.stop()
    assert host.error is None
    assert [[step.index for step in steps] for steps in saved] == [[0], [1]]
    assert [(report.turns, report.mark) for report in reports] == [(1, 0), (2, turn.mark)]


@pytest.mark.parametrize(("ends_s", "ends"), [(-1.0, [1, 1]), (1000.0, [2])])
def test_ends_that_take_long_are_reported_before_the_next_ones(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, ends_s: float, ends: list[int]
) -> None:
    """So others can go on with them."""
    monkeypatch.setattr(driver, "_ENDS_S", ends_s)
    source = "kept = [].save()\nfor _ in tracer.iter[:]:\n    kept.append(model.model.layers[0].output[0].clone())"
    began, reached = hosted.reached(source, torch.zeros(2, 4))
    (first,) = began.new
    other = "s-00000000"
    arrived = [first, Arrived(other, first.arguments)]
    hosted.turn(Began(arrived, [(ID, 1, 0), (other, 1, 0)]), reached, Ended(b""), waits=False)
    assert len(hosted.saved()) == 2
    assert not hosted.reported().finishes
    hosted.turn(Finished(ID, 1), Finished(other, 1), waits=False)
    assert [len(hosted.reported().finishes) for _ in ends] == ends


def test_a_report_that_is_read_late_arrives_whole_before_the_next_turn(hosted: Hosted) -> None:
    """The kernel does not take all of it at once."""
    began, reached = hosted.reached("import torch\nheld = torch.ones(10_000_000).save()", torch.zeros(2, 4))
    hosted.turn(began, reached, waits=True)
    hosted.turn(Ended(), waits=False)
    (step,) = hosted.saved()
    assert len(step.deltas) > 40_000_000
    assert hosted.reported().turns == 2


def test_a_step_that_saves_more_than_a_report_takes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST_REPORTED", 1000)
    host = Hosted()
    host.turn(*host.reached("import torch\nheld = torch.ones(1000).save()", torch.zeros(2, 4)), Ended(), waits=False)
    host._thread.join(30)
    assert "the saves of a turn take 4" in str(host.error)
    host.stop()


def test_a_save_for_which_the_worker_has_no_room_is_refused_and_named() -> None:
    host = Hosted(blob_threshold=1000)
    source = """
import torch
first = torch.ones(1000).save()
for step in tracer.iter[:]:
    model.model.layers[0].output
    if step == 1:
        second = torch.ones(1000).save()
        third = torch.ones(1000).save()
"""
    began, reached = host.reached(source, torch.zeros(1, 4))
    encode = msgspec.msgpack.encode
    host.calls.send(encode(Turn([began, reached, Ended()], large_allowed=4000)))
    chunks = [host.received() for _ in range(2)]
    assert [type(one) for one in chunks] == [Chunk, Reported]
    host.calls.send(encode(Turn([Began([], [(ID, 1, 1)]), reached, Ended()], large_allowed=8000)))
    assert [type(host.received()) for _ in range(2)] == [Chunk, Reported]
    host.calls.send(encode(Turn([Finished(ID, 2)], large_allowed=8000)))
    (finish,) = host.reported().finishes
    assert finish.save_errors == {"third": "earlier large arrays wait for the bus; at most 0 bytes more may"}
    host.stop()
    assert host.error is None
