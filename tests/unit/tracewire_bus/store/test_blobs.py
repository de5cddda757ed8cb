"""Blobs on a real Redis: in chunks, checked, with the life of their trace, and paid for by those who load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

from tests.support.redis.proxy import proxy
from tracewire_bus.bus import Bus, BusUnavailable
from tracewire_bus.events.appends import UNFINISHED_S
from tracewire_bus.store.blobs import CHUNK_BYTES, UNACCEPTED_S, BlobMissing
from tracewire_bus.store.keys import TAGS, Keys
from tracewire_bus.wire.digests import digest, former_digest
from tracewire_bus.wire.refs import ArrayRef


def array(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
async def test_what_is_stored_is_loaded(bus: Bus, nbytes: int) -> None:
    value = array(nbytes)
    ref = await bus.blobs.store("t", value, "acts")
    assert (ref.digest, ref.nbytes, ref.shape, ref.name) == (former_digest(value), nbytes, (nbytes,), "acts")
    loaded = await bus.blobs.load("t", ref)
    assert np.array_equal(loaded, value)
    assert not loaded.flags.writeable
    lengths = await bus.command("HLEN", bus.keys.blobs("t"))
    assert lengths == -(-nbytes // CHUNK_BYTES)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ">f4", np.complex128, np.bool_])
async def test_any_dtype_and_layout_is_stored_as_it_would_travel(bus: Bus, dtype: Any) -> None:
    value = np.arange(6000).reshape(60, 100).astype(dtype)[::2].T
    ref = await bus.blobs.store("t", value)
    loaded = await bus.blobs.load("t", ref)
    assert digest(loaded) == digest(value)
    # That of the arrays that engines share.
    assert ref.digest == former_digest(value)
    assert ref.nbytes == value.nbytes


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_missing_chunk_is_told(bus: Bus, lost: int) -> None:
    ref = await bus.blobs.store("t", array(2 * CHUNK_BYTES + 1))
    await bus.command("HDEL", bus.keys.blobs("t"), f"{ref.blob}:{lost}")
    with pytest.raises(BlobMissing, match=f"chunk {lost} of 3"):
        await bus.blobs.load("t", ref)


@pytest.mark.parametrize("change", [b"", b"x", b"x" * CHUNK_BYTES, b"x" * (CHUNK_BYTES + 1)])
async def test_bytes_that_are_not_those_of_the_reference_are_told(bus: Bus, change: bytes) -> None:
    ref = await bus.blobs.store("t", array(2 * CHUNK_BYTES))
    await bus.command("HSET", bus.keys.blobs("t"), f"{ref.blob}:0", change)
    with pytest.raises(BlobMissing, match="do not match the reference"):
        await bus.blobs.load("t", ref)


async def test_a_reference_that_claims_to_be_huge_costs_nothing(bus: Bus) -> None:
    ref = ArrayRef("float64", (2**40, 2**10), bytes(16), "none")
    with pytest.raises(BlobMissing, match="chunk 0"):
        await bus.blobs.load("t", ref)


def test_blobs_lie_in_the_slot_of_their_trace() -> None:
    keys = Keys("p")
    for number in range(2 * TAGS):
        trace = f"trace{number}"
        tag = f"{{{keys.tag(trace)}}}"
        assert tag in keys.blobs(trace)
        assert tag in keys.events(trace)
    assert keys.blobs("a") != keys.blobs("b")


async def test_blobs_live_as_long_as_their_trace(embedded: str, prefix: str) -> None:
    async with Bus.open(embedded, prefix=prefix, retention_s=100) as bus, bus.writer() as writer:
        key = bus.keys.blobs("t")

        async def ttl() -> int:
            return int(await bus.command("TTL", key))

        ref = await bus.blobs.store("t", array(10))
        assert 0 < await ttl() <= UNACCEPTED_S
        await writer.append("t", 1, 0, b"accepted")
        assert UNACCEPTED_S < await ttl() <= UNFINISHED_S
        await bus.blobs.store("t", array(11))
        # A further blob does not shorten it.
        assert await ttl() > UNACCEPTED_S
        await writer.append("t", 1, 1, b"final", final=True)
        assert 0 < await ttl() <= 100
        # Nor does one that comes too late prolong it.
        await bus.blobs.store("t", array(12))
        assert 0 < await ttl() <= 100
        await bus.command("PEXPIRE", key, 0)
        with pytest.raises(BlobMissing, match="expired"):
            await bus.blobs.load("t", ref)


async def test_a_chunk_can_wait_for_a_redis_that_is_away(embedded: str, prefix: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as through, Bus.open(through.url, prefix=prefix, patience_s=0.1) as bus:
        await bus.blobs.store("t", array(1))
        through.away = True
        await through.cut()
        async with anyio.create_task_group() as group:
            put = anyio.Event()

            async def wait() -> None:
                await bus.blobs.put("t", "blob", 0, b"chunk", wait=True)
                put.set()

            group.start_soon(wait)
            with pytest.raises(BusUnavailable):
                await bus.blobs.store("t", array(2 * CHUNK_BYTES))
            assert not put.is_set()
            through.away = False
        assert await bus.command("HGET", bus.keys.blobs("t"), "blob:0") == b"chunk"


async def test_a_cut_connection_costs_no_chunk(embedded: str, prefix: str, tmp_path: Path) -> None:
    async with proxy(embedded, tmp_path) as through, Bus.open(through.url, prefix=prefix) as bus:
        through.swallow = b":1\r\n"
        value = array(3 * CHUNK_BYTES)
        ref = await bus.blobs.store("t", value)
        assert through.swallowed.is_set()
        assert np.array_equal(await bus.blobs.load("t", ref), value)


async def test_appends_do_not_queue_behind_a_blob(bus: Bus) -> None:
    """While 100 MB are written, another trace's events go on; how fast is measured in `benchmarks/blobs.py`."""
    async with bus.writer() as writer, anyio.create_task_group() as group:
        done = anyio.Event()
        during = 0

        async def store() -> None:
            await bus.blobs.store("large", array(100 * 1024 * 1024))
            done.set()

        group.start_soon(store)
        while not done.is_set():
            await writer.append("other", 1, during, b"event")
            during += 1
    # No chunk is followed by another before the others had their turn.
    assert during >= 100
    await bus.command("DEL", bus.keys.blobs("large"))
