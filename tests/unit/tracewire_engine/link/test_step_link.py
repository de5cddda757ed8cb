"""The link of steps: bytes come in order, by shared memory or in messages."""

from __future__ import annotations

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.far_link import adapter, reports, worker
from tests.support.killed_owner import left_by_killed
from tests.support.ring import filled, send
from tracewire_engine.link import shared_ring
from tracewire_engine.link.blob_receiver import BlobChunk, BlobReceiver
from tracewire_engine.link.liveness import HeartbeatReceiver
from tracewire_engine.link.shared_ring import Place, RingBuffer
from tracewire_engine.link.step_link import LinkReceiver, LinkSender
from tracewire_engine.protocol.messages import Batch, FinishRecord, Report, StepRecord
from tracewire_engine.worker.remote_inputs import inputs_at


async def test_over_the_link_bytes_come_in_order_whichever_way_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tracewire_engine.link.step_link.RingBuffer", lambda size, readers: RingBuffer(16 << 20, readers)
    )
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        found: list[Batch] = []
        shared = 0
        for step in range(300):
            # More than the ring holds in all, and a receiver that looks seldom.
            shared += send(sender, step, filled(200_000, step))
            if step % 100 in (0, 99):
                while len(found) <= step:
                    await receiver.arrived()
                    for report in receiver.ready():
                        assert report.batch is not None
                        assert bytes(report.batch.data) == filled(200_000, len(found)).numpy().tobytes()
                        found.append(report.batch)
        assert [batch.step for batch in found] == list(range(300))
        # The bytes of a report before are the worker's again.
        with pytest.raises(ValueError, match="released"):
            bytes(next(batch for batch in found if batch.place is not None).data)
        # The first goes before the receiver has it open; of a hundred that nobody takes, not all have room.
        assert 150 < shared < 290


@pytest.mark.parametrize("most", [1 << 20, 1 << 30])
async def test_larger_steps_get_a_larger_ring(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """And the bytes that lie in the smaller one are read before it goes."""
    monkeypatch.setattr(shared_ring, "RING_BYTES", 1 << 20)
    monkeypatch.setattr(shared_ring, "MOST_RING_BYTES", most)
    sizes = [50_000] * 4 + [600_000] * 6 + [3_000_000] * 6
    shared = []
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        found = 0
        for step, size in enumerate(sizes):
            shared.append(send(sender, step, filled(size, step)))
            # Of two steps at a time, so that one lies in the ring as the next one comes.
            while step % 2 and found <= step:
                await receiver.arrived()
                for report in receiver.ready():
                    assert report.batch is not None
                    assert bytes(report.batch.data) == filled(sizes[found], found).numpy().tobytes()
                    found += 1
    if most > 1 << 20:
        assert shared == [False, False, True, True] + [False, False, True, True, True, True] * 2
    else:
        assert not any(shared[10:])


async def test_without_memory_for_a_larger_ring_the_smaller_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def ring(size: int, readers: int) -> RingBuffer:
        made.append(size)
        if len(made) > 1:
            raise OSError("no memory")
        return RingBuffer(1 << 20, readers)

    monkeypatch.setattr("tracewire_engine.link.step_link.RingBuffer", ring)
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        shared = []
        for step, size in enumerate([50_000, 50_000, 3_000_000, 3_000_000, 50_000]):
            shared.append(send(sender, step, filled(size, step)))
            await receiver.arrived()
            for report in receiver.ready():
                assert report.batch is not None
                assert bytes(report.batch.data) == filled(size, step).numpy().tobytes()
    assert shared == [False, True, False, False, True]
    assert len(made) == 2


async def test_a_receiver_that_cannot_open_it_gets_all_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, reader: int) -> None:
        raise PermissionError(name, reader)

    monkeypatch.setattr("tracewire_engine.link.step_link.RingReader", refused)
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        found: list[Report] = []
        for step in range(5):
            assert not send(sender, step, filled(50_000, step))
            while len(found) <= step:
                await receiver.arrived()
                found += receiver.ready()
        assert all(report.batch and len(report.batch.data) == 50_000 for report in found)


async def test_a_step_that_cannot_be_found_takes_no_other_with_it() -> None:
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        lost = Report(1.0, batch=Batch(1, 1, place=Place(0, 100_000, 100_096)))
        sender.send(Report(1.0, batch=Batch(1, 0, memoryview(b"first"))), lost, Report(1.0, batch=Batch(1, 2)))
        await receiver.arrived()
        first, second, third = receiver.ready()
        assert first.batch is not None
        assert bytes(first.batch.data) == b"first"
        assert second.batch is None
        assert third.batch is not None


async def test_large_deltas_come_with_their_records() -> None:
    def made(size: int, seed: int) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode([bytes([seed]) * size]))

    sizes = [10, 1 << 16, 70_000, 0, 300_000, 65_000]
    reports = [
        Report(
            time=float(number),
            steps=[StepRecord(f"{number}.{place}", 0, place, made(size, place)) for place, size in enumerate(sizes)],
            finishes=[FinishRecord(f"{number}.end", 0, made(size, 99)) for size in sizes[: number + 1]],
        )
        for number in range(3)
    ]
    before = msgspec.msgpack.encode(reports)
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        sender.send(*reports[:2])
        sender.send(reports[2])
        assert msgspec.msgpack.encode(reports) == before
        found: list[Report] = []
        while len(found) < 3:
            await receiver.arrived()
            found += receiver.ready()
    assert msgspec.msgpack.encode(found) == before


async def test_a_record_that_cannot_be_encoded_takes_its_large_deltas_with_it() -> None:
    large = msgspec.Raw(msgspec.msgpack.encode([b"x" * 100_000]))
    odd = "\ud800"  # no UTF-8
    steps = [StepRecord("a", 0, 1, large), StepRecord("b", 0, 1, large, odd), StepRecord("c", 0, 1, large)]
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        sender.send(Report(steps=steps[::2]), Report(steps=[steps[1]]))
        sender.send(Report(time=2.0))
        found: list[Report] = []
        while not found or not found[-1].time:
            await receiver.arrived()
            found += receiver.ready()
    got = {step.request: (step.deltas == large, step.ended) for report in found for step in report.steps}
    assert got == {"a": (True, ""), "b": (False, "error"), "c": (True, "")}


async def test_parts_that_belong_to_no_record_cost_one_message(caplog: pytest.LogCaptureFixture) -> None:
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        sender._socket.send_multipart([msgspec.msgpack.encode([Report(time=1.0)]), b"left over"])
        sender.send(Report(time=2.0))
        found: list[Report] = []
        while not found:
            await receiver.arrived()
            found += receiver.ready()
    assert [report.time for report in found] == [2.0]
    assert "a report of a worker could not be decoded" in caplog.text


async def test_it_carries_reports_and_large_arrays() -> None:
    with adapter() as ends, worker(ends.address) as process:
        assert [report.time for report in await reports(ends.link, 1)] == [0.0]
        items = ends.blobs.items()
        with anyio.fail_after(60):
            chunk, record = [await anext(items) for _ in range(2)]
        assert isinstance(chunk, BlobChunk)
        assert np.frombuffer(chunk.data, np.float32).tolist() == list(range(1000))
        assert isinstance(record, Report)
        assert [step.request for step in record.steps] == ["large"]
        assert process.stdin is not None
        process.stdin.write("\n\n")
        process.stdin.flush()
        assert [report.time for report in await reports(ends.link, 2)] == [1.0, 2.0]


def test_on_one_machine_nothing_listens() -> None:
    with LinkReceiver() as link, BlobReceiver(link.address) as blobs, HeartbeatReceiver(blobs.address) as pulse:
        assert pulse.address == blobs.address == link.address
        assert link.address.startswith("ipc://")
        assert link.guard is None
        assert inputs_at(link.address) == link.folder


def test_the_next_adapter_removes_the_folder_of_one_that_was_killed() -> None:
    makes = """
from tracewire_engine.link.step_link import LinkReceiver
link = LinkReceiver()
other = LinkReceiver(beside=link.address, adapter=1)
path = link.folder
"""
    left = left_by_killed(makes)
    assert (left / "adapter-1" / "link").is_socket()
    with LinkReceiver() as link, LinkReceiver() as other:
        assert not left.exists()
        assert link.folder.exists()
        assert other.folder.exists()
    assert not link.folder.exists()
