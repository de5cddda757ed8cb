"""The shared memory between a worker and its adapter, without either."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgspec
import pytest

from tests.support.ring import SIZE, filled, place_of
from tracewire_engine.link.shared_ring import LEAST_BYTES, Place, RingBuffer, RingReader


def taken(reader: RingReader, place: Place) -> bytes:
    """The bytes at a place, which the worker may reuse afterwards."""
    data = bytes(reader.view(place))
    reader.release(place)
    return data


def test_nothing_is_put_in_before_the_adapter_has_it_open() -> None:
    ring = RingBuffer(SIZE)
    assert ring.put(filled(LEAST_BYTES, 1)) is None
    with RingReader(ring.name) as reader:
        place = place_of(ring.put(filled(LEAST_BYTES, 1)))
        assert taken(reader, place) == filled(LEAST_BYTES, 1).numpy().tobytes()


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
                assert taken(reader, place) == data
        assert 0 < refused < 300
        for place, data in waiting:
            assert taken(reader, place) == data
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
            assert taken(reader, place_of(ring.put(tensor))) == tensor.numpy().tobytes()


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
            with pytest.raises(ValueError, match="outside the shared memory"):
                reader.view(place)


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
            assert taken(reader, place) == b"\x07" * 100_000
