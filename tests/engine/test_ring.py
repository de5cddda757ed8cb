"""The shared memory between a worker and its adapter, without either."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgspec
import pytest
import torch

from tracewire_engine.link.shared_ring import LEAST_BYTES, Place, RingBuffer, RingCopy, RingReader
from tracewire_engine.link.step_link import LinkReceiver, LinkSender
from tracewire_engine.protocol.messages import Batch, Report
from tracewire_engine.worker.host_copy import PinnedCopy

SIZE = 16 * LEAST_BYTES


def filled(size: int, number: int) -> torch.Tensor:
    return (torch.arange(size, dtype=torch.int64) * 31 + number).to(torch.uint8)


def place_of(found: RingCopy | None) -> Place:
    assert found is not None
    assert found.done
    batch = Batch(0, 0)
    found.fill(batch)
    found.release()
    assert batch.place is not None
    return batch.place


def test_nothing_is_put_in_before_the_adapter_has_it_open() -> None:
    ring = RingBuffer(SIZE)
    assert ring.put(filled(LEAST_BYTES, 1)) is None
    with RingReader(ring.name) as reader:
        place = place_of(ring.put(filled(LEAST_BYTES, 1)))
        assert bytes(reader.take(place)) == filled(LEAST_BYTES, 1).numpy().tobytes()


def test_few_bytes_are_not_put_in() -> None:
    ring = RingBuffer(SIZE)
    with RingReader(ring.name):
        assert ring.put(filled(LEAST_BYTES - 1, 1)) is None


@pytest.mark.parametrize("seed", range(5))
def test_bytes_come_out_as_they_went_in_and_a_reader_that_is_behind_loses_none(seed: int) -> None:
    chance = random.Random(seed)
    ring = RingBuffer(SIZE)
    waiting: list[tuple[Place, bytes]] = []
    refused = 0
    with RingReader(ring.name) as reader:
        for number in range(400):
            tensor = filled(chance.randrange(LEAST_BYTES, SIZE // 3), number)
            put = ring.put(tensor)
            # What a message would have.
            refused += put is None
            if put is not None:
                waiting.append((place_of(put), tensor.numpy().tobytes()))
            while waiting and chance.random() < 0.6:
                place, data = waiting.pop(0)
                assert bytes(reader.take(place)) == data
        assert 0 < refused < 300
        for place, data in waiting:
            assert bytes(reader.take(place)) == data
        # All of it is free again.
        assert ring.put(filled(SIZE // 2, 1)) is not None


def test_more_than_it_holds_goes_in_the_message() -> None:
    ring = RingBuffer(SIZE)
    with RingReader(ring.name):
        assert ring.put(filled(SIZE + 1, 1)) is None
        assert ring.put(filled(LEAST_BYTES, 1)) is not None


def test_large_tensors_have_room_wherever_an_empty_ring_has_come_to() -> None:
    ring = RingBuffer(SIZE)
    with RingReader(ring.name) as reader:
        for size in (SIZE // 3, 3 * SIZE // 4, 3 * SIZE // 4, SIZE, SIZE // 3, SIZE, SIZE):
            tensor = filled(size, size)
            assert bytes(reader.take(place_of(ring.put(tensor)))) == tensor.numpy().tobytes()


def test_only_a_workers_memory_is_opened() -> None:
    for name in ("/etc/passwd", "", "/proc/self/fd/0", "/proc/1/fd/../../../etc/passwd"):
        with pytest.raises(ValueError, match="shared memory"):
            RingReader(name)


def test_memory_that_could_be_cut_off_is_not_read() -> None:
    descriptor = os.memfd_create("cut", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 1 << 20)
        with pytest.raises((ValueError, OSError)):
            RingReader(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
    ring = RingBuffer(SIZE)
    descriptor = int(ring.name.rpartition("/")[2])
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 0)


def test_a_place_outside_of_it_is_an_error() -> None:
    ring = RingBuffer(SIZE)
    with RingReader(ring.name) as reader:
        for place in (Place(-1, 8, 8), Place(0, SIZE + 1, 8), Place(SIZE, 1, 8), Place(8, -1, 8)):
            with pytest.raises(ValueError, match="no place"):
                reader.take(place)


def send(sender: LinkSender, step: int, tensor: torch.Tensor) -> bool:
    """As the runner does; whether the bytes were shared."""
    report = Report(1.0, batch=Batch(1, step))
    assert report.batch is not None
    copy = sender.put(tensor, report) or PinnedCopy(tensor)
    copy.fill(report.batch)
    sender.send(report)
    copy.release()
    return isinstance(copy, RingCopy)


async def test_over_the_link_bytes_come_in_order_whichever_way_they_take() -> None:
    with LinkReceiver() as receiver:
        sender = LinkSender(receiver.address)
        found: list[Report] = []
        shared = 0
        for step in range(300):
            # More than the ring holds in all, and a receiver that looks seldom.
            shared += send(sender, step, filled(200_000, step))
            if step % 100 in (0, 99):
                while len(found) <= step:
                    await receiver.arrived()
                    found += receiver.ready()
        assert [report.batch.step for report in found if report.batch] == list(range(300))
        for step, report in enumerate(found):
            assert report.batch is not None
            assert bytes(report.batch.data) == filled(200_000, step).numpy().tobytes()
        # The first goes before the receiver has it open; of a hundred that nobody takes, not all have room.
        assert 150 < shared < 290


async def test_a_receiver_that_cannot_open_it_gets_all_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise PermissionError(name)

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


def test_a_worker_of_another_process_shares_its_own() -> None:
    code = (
        "import sys, msgspec, torch\n"
        "from tracewire_engine.protocol.messages import Batch\n"
        "from tracewire_engine.link.shared_ring import RingBuffer\n"
        "ring = RingBuffer(1 << 20)\n"
        "print(ring.name, flush=True)\n"
        "sys.stdin.readline()\n"
        "put = ring.put(torch.full((100_000,), 7, dtype=torch.uint8))\n"
        "batch = Batch(0, 0)\n"
        "put.fill(batch)\n"
        "print(msgspec.json.encode(batch.place).decode(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        with RingReader(worker.stdout.readline().strip()) as reader:
            worker.stdin.write("\n")
            worker.stdin.flush()
            place = msgspec.json.decode(worker.stdout.readline(), type=Place)
            # What it has put in outlives it.
            worker.stdin.close()
            worker.wait(20)
            assert bytes(reader.take(place)) == b"\x07" * 100_000
