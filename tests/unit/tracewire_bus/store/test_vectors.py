"""Vectors on a real Redis: stored once, under names that only their content has, and again where they may be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

from tests.support.redis.proxy import proxy
from tests.support.vectors import encoded
from tracewire_bus.bus import Bus, BusUnavailable
from tracewire_bus.store import vectors as module
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.store.vectors import KEPT_S, VectorMissing, Vectors
from tracewire_bus.wire.refs import VECTOR, ArrayRef, is_vector

PATIENCE = 60


def array(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[set[ArrayRef]]:
    """What each call has written to Redis."""
    found: list[set[ArrayRef]] = []
    write = Vectors._write

    async def noted(self: Vectors, payloads: dict[ArrayRef, bytes]) -> None:
        found.append(set(payloads))
        await write(self, payloads)

    monkeypatch.setattr(Vectors, "_write", noted)
    return found


@pytest.mark.parametrize(
    "value",
    [
        *(array(nbytes) for nbytes in (1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5)),
        np.linspace(-1, 1, 2048, dtype=np.float32),
        np.arange(6000).reshape(60, 100).astype(ml_dtypes.bfloat16)[::2].T,
    ],
)
async def test_what_is_stored_is_fetched(bus: Bus, value: Any) -> None:
    ref, payload = encoded(value)
    await bus.vectors.store({ref: payload})
    found = await bus.vectors.fetch(ref)
    assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert not found.flags.writeable


def test_the_name_is_of_dtype_shape_and_content() -> None:
    value = np.arange(12, dtype=np.float32)
    others = [value, value.reshape(3, 4), value.view(np.int32), value + 1, value.astype(np.float64)]
    refs = [encoded(one)[0] for one in others]
    assert len({ref.blob for ref in refs}) == len(others)
    assert encoded(value.copy())[0].blob == refs[0].blob
    assert all(map(is_vector, refs))
    for blob in ("abcdef", VECTOR + "00" * 16, f"{refs[0].blob}/.."):
        assert not is_vector(ArrayRef("float32", (12,), refs[0].digest, blob))


async def test_several_are_stored_in_one_call_and_one_key_each(bus: Bus, writes: list[set[ArrayRef]]) -> None:
    both = dict(encoded(array(nbytes)) for nbytes in (5000, 2 * CHUNK_BYTES + 1, 6000))
    await bus.vectors.store(both)
    assert writes == [set(both)]
    for ref in both:
        key = bus.keys.vector(ref.blob)
        assert await bus.command("HLEN", key) == -(-ref.nbytes // CHUNK_BYTES)
        assert 0 < await bus.command("TTL", key) <= KEPT_S


@pytest.mark.parametrize("change", [b"", b"x", b"x" * CHUNK_BYTES, b"x" * (CHUNK_BYTES + 1)])
async def test_what_was_tampered_with_is_told(bus: Bus, change: bytes) -> None:
    ref, payload = encoded(array(2 * CHUNK_BYTES))
    await bus.vectors.store({ref: payload})
    await bus.command("HSET", bus.keys.vector(ref.blob), 0, change)
    with pytest.raises(VectorMissing, match="does not match"):
        await bus.vectors.fetch(ref)


async def test_another_dtype_or_shape_than_was_stored_is_told(bus: Bus) -> None:
    ref, payload = encoded(np.arange(2048, dtype=np.float32))
    await bus.vectors.store({ref: payload})
    for dtype, shape in [("int32", (2048,)), ("float32", (2, 1024)), ("float32", (1024,)), ("float32", (4096,))]:
        with pytest.raises(VectorMissing, match=r"does not match|chunk"):
            await bus.vectors.fetch(ArrayRef(dtype, shape, ref.digest, ref.blob))


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_missing_chunk_is_told(bus: Bus, lost: int) -> None:
    ref, payload = encoded(array(2 * CHUNK_BYTES + 1))
    await bus.vectors.store({ref: payload})
    await bus.command("HDEL", bus.keys.vector(ref.blob), lost)
    with pytest.raises(VectorMissing, match=f"chunk {lost} of 3"):
        await bus.vectors.fetch(ref)


async def test_a_reference_that_claims_to_be_huge_costs_nothing(bus: Bus) -> None:
    with pytest.raises(VectorMissing, match="chunk 0"):
        await bus.vectors.fetch(ArrayRef("float64", (2**40, 2**10), bytes(16), VECTOR + bytes(16).hex()))


async def test_use_extends_its_life(bus: Bus) -> None:
    ref, payload = encoded(array(5000))
    key = bus.keys.vector(ref.blob)
    for use in (lambda: bus.vectors.fetch(ref), lambda: bus.vectors.store({ref: payload})):
        bus.vectors.forget()
        await bus.vectors.store({ref: payload})
        await bus.command("EXPIRE", key, 10)
        bus.vectors.forget()
        await use()
        assert 10 < await bus.command("TTL", key) <= KEPT_S


async def test_what_was_stored_lately_is_not_stored_again(bus: Bus, writes: list[set[ArrayRef]]) -> None:
    (one, first), (other, second) = encoded(array(5000)), encoded(array(6000))
    await bus.vectors.store({one: first})
    await bus.vectors.store({one: first})
    await bus.vectors.store({one: first, other: second})
    assert writes == [{one}, {other}]
    bus.vectors.forget()
    await bus.vectors.store({one: first})
    assert writes[2:] == [{one}]


async def test_it_is_stored_again_after_an_hour(
    bus: Bus, writes: list[set[ArrayRef]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, payload = encoded(array(5000))
    await bus.vectors.store({ref: payload})
    now = anyio.current_time
    monkeypatch.setattr(anyio, "current_time", lambda: now() + module.KNOWN_S - 60)
    await bus.vectors.store({ref: payload})
    assert len(writes) == 1
    monkeypatch.setattr(anyio, "current_time", lambda: now() + module.KNOWN_S + 1)
    await bus.vectors.store({ref: payload})
    assert len(writes) == 2


async def test_tasks_that_store_the_same_at_once_write_it_once(bus: Bus, writes: list[set[ArrayRef]]) -> None:
    payloads = dict(encoded(array(5000 + number)) for number in range(3))
    refs = list(payloads)
    async with anyio.create_task_group() as group:
        for number in range(20):
            some = refs[: 1 + number % 3]
            group.start_soon(bus.vectors.store, {ref: payloads[ref] for ref in some})
    assert sorted(ref.blob for one in writes for ref in one) == sorted(ref.blob for ref in refs)


async def test_who_waits_for_a_task_that_is_cancelled_stores_it_itself(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, payload = encoded(array(5000))
    begun = anyio.Event()
    write = Vectors._write

    async def stuck(self: Vectors, payloads: dict[ArrayRef, bytes]) -> None:
        if not begun.is_set():
            begun.set()
            await anyio.sleep_forever()
        await write(self, payloads)

    monkeypatch.setattr(Vectors, "_write", stuck)
    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await bus.vectors.store({ref: payload})

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(cancelled)
            await begun.wait()
            group.start_soon(bus.vectors.store, {ref: payload})
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert (await bus.vectors.fetch(ref)).shape == ref.shape


async def test_after_redis_was_away_it_is_stored_again(
    embedded: str, prefix: str, tmp_path: Path, writes: list[set[ArrayRef]]
) -> None:
    ref, payload = encoded(array(5000))
    async with proxy(embedded, tmp_path) as through, Bus.open(through.url, prefix=prefix, patience_s=5) as bus:
        await bus.vectors.store({ref: payload})
        await bus.command("DEL", bus.keys.vector(ref.blob))
        await through.cut()
        # Whatever command finds the connection broken.
        await bus.command("PING")
        await bus.vectors.store({ref: payload})
        # Once more if the connection for vectors turned out to be broken, too.
        assert len(writes) in (2, 3)
        assert (await bus.vectors.fetch(ref)).shape == ref.shape


async def test_a_redis_that_is_away_is_told(embedded: str, prefix: str, tmp_path: Path) -> None:
    ref, payload = encoded(array(5000))
    async with proxy(embedded, tmp_path) as through, Bus.open(through.url, prefix=prefix, patience_s=0.1) as bus:
        through.away = True
        await through.cut()
        with pytest.raises(BusUnavailable):
            await bus.vectors.store({ref: payload})
        through.away = False
        await bus.vectors.store({ref: payload})
        assert (await bus.vectors.fetch(ref)).shape == ref.shape


async def test_an_array_is_known_by_all_of_its_bytes(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two arrays have one XXH3, too, which anybody can arrange."""
    ref, payload = encoded(array(5000))
    assert bus.vectors.known(payload) is None
    await bus.vectors.store({ref: payload})
    assert bus.vectors.known(bytes(bytearray(payload))) is ref
    same: Callable[[bytes], bytes] = lambda data: b"same"  # noqa: E731
    monkeypatch.setattr("tracewire_bus.store.vectors.xxhash.xxh3_128_digest", same)
    other, different = encoded(array(5001))
    again = bytes(bytearray(payload))
    await bus.vectors.store({ref: again})
    assert bus.vectors.known(different) is None
    await bus.vectors.store({other: different})
    assert bus.vectors.known(different) is other
    assert bus.vectors.known(again) is None


async def test_what_is_remembered_is_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BYTES", 20_000)
    arrays = [encoded(array(5000 + number)) for number in range(8)]
    for ref, payload in arrays:
        await bus.vectors.store({ref: payload})
        assert bus.vectors.known(arrays[0][1]) is arrays[0][0]
    assert bus.vectors._bytes == sum(len(payload) for payload, _ in bus.vectors._references.values()) <= 20_000
    assert bus.vectors.known(arrays[1][1]) is None


async def test_the_same_object_is_digested_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, payload = encoded(array(5000))
    await bus.vectors.store({ref: payload})
    digested: list[bytes] = []
    digest = module.xxhash.xxh3_128_digest
    monkeypatch.setattr(
        "tracewire_bus.store.vectors.xxhash.xxh3_128_digest", lambda data: digested.append(data) or digest(data)
    )
    assert bus.vectors.known(payload) is ref
    await bus.vectors.store({ref: payload})
    assert digested == []
    copy = bytes(bytearray(payload))
    assert bus.vectors.known(copy) is ref
    assert digested == [copy]
    # The object that came last is the one that is remembered.
    await bus.vectors.store({ref: copy})
    assert bus.vectors.known(copy) is ref
    assert len(digested) == 2
    assert len(bus.vectors._keys_by_id) == len(bus.vectors._references) == 1
