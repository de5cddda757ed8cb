"""The library on a real Redis: whole versions of names, kept until they are removed, in spaces of their own."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from tests.support.redis.servers import BINARIES, running_servers
from tracewire_bus.bus import Bus, NotAllowed
from tracewire_bus.store import library as module
from tracewire_bus.store.access import rules
from tracewire_bus.store.blobs import CHUNK_BYTES
from tracewire_bus.store.library import (
    EntryMissing,
    LibraryFull,
    NewestDiffers,
    Stored,
    described,
    is_entry_name,
    is_space,
)
from tracewire_bus.transport.errors import BusError
from tracewire_bus.transport.guard import Malformed
from tracewire_bus.transport.scripts import Script
from tracewire_bus.wire.library import FORMAT, EntryMessage

VECTOR = np.linspace(-1, 1, 64, dtype=np.float32)


def entry(name: str = "calm", **arrays: Any) -> tuple[EntryMessage, dict[str, Any]]:
    """An entry, and its arrays."""
    given = arrays or {"vector": VECTOR}
    described_ = {key: described(value) for key, value in given.items()}
    return EntryMessage(name=name, kind="vector", model="tiny", at="residual(2)", arrays=described_, by="one"), given


async def put(bus: Bus, name: str = "calm", space: str = "", **arrays: Any) -> int:
    """Put an entry, and return its version."""
    return await bus.library.put(space, *entry(name, **arrays))


async def found(bus: Bus, name: str = "calm", version: int | None = None, space: str = "") -> Stored:
    """A version that must be there."""
    stored = await bus.library.find(space, name, version)
    assert stored is not None
    return stored


@pytest.mark.parametrize(
    "array",
    [
        VECTOR,
        np.zeros((0, 4), np.float32),
        np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 5, dtype=np.uint8),
        np.arange(12, dtype=np.float16).reshape(3, 4).T,
    ],
)
async def test_what_is_put_is_found(bus: Bus, array: Any) -> None:
    assert await put(bus, vector=array) == 1
    stored = await found(bus)
    assert (stored.name, stored.version, stored.entry) == ("calm", 1, entry(vector=array)[0])
    fetched = await bus.library.fetch(stored, "vector")
    assert (fetched.dtype, fetched.shape, fetched.tobytes()) == (array.dtype, array.shape, array.tobytes())


async def test_a_name_without_a_version_is_the_newest_that_is_there(bus: Bus) -> None:
    assert [await put(bus) for _ in range(3)] == [1, 2, 3]
    assert await put(bus, "other") == 1
    assert (await found(bus)).version == 3
    assert await bus.library.remove(await found(bus, version=3), "two of us")
    assert (await found(bus)).version == 2
    assert await bus.library.remove(await found(bus, version=1), "two")
    assert (await found(bus)).version == 2
    # Its number is not given again.
    assert await put(bus) == 4
    for version in (2, 4):
        assert await bus.library.remove(await found(bus, version=version), "two")
    assert await bus.library.find("", "calm") is None
    assert await put(bus) == 5


async def test_a_removed_version_says_who_removed_it_and_its_arrays_are_gone(bus: Bus) -> None:
    await put(bus)
    stored = await found(bus)
    assert await bus.library.remove(stored, "two of us")
    assert not await bus.library.remove(stored, "three")
    gone = await found(bus, version=1)
    assert (gone.entry, gone.removed_by) == (None, "two_of_us")
    assert gone.removed is not None
    assert gone.removed >= gone.time == stored.time
    with pytest.raises(EntryMissing):
        await bus.library.fetch(stored, "vector")
    assert not await bus.command("EXISTS", bus.keys.library_arrays("", stored.upload))


async def test_redis_keeps_it_until_it_is_removed(bus: Bus) -> None:
    await put(bus)
    assert await bus.command("TTL", bus.keys.library_arrays("", (await found(bus)).upload)) == -1


async def test_what_a_client_that_died_has_uploaded_expires(bus: Bus) -> None:
    key = bus.keys.library_arrays("", "left")
    assert await bus.library._upload(key, {"vector": VECTOR}) == 1
    assert 0 < await bus.command("TTL", key) <= module.UPLOAD_S
    assert await bus.library.load("") == []


async def test_a_put_that_is_sent_again_counts_once(bus: Bus) -> None:
    one, arrays = entry()
    await bus.library._upload(bus.keys.library_arrays("", "again"), arrays)
    command = Script("library_put")(
        bus.library._all("", "again"), one.name, msgspec.msgpack.encode(one), 1, FORMAT, 9, ""
    )
    assert [await bus.command(*command) for _ in range(2)] == [[1, 0], [1, 0]]
    assert len(await bus.library.load("")) == 1


async def test_a_removal_that_is_sent_again_counts_once(bus: Bus) -> None:
    await put(bus)
    keys = bus.library._all("", (await found(bus)).upload)
    command = Script("library_remove")(keys, "calm", 1, "two", 9, "operation")
    assert [await bus.command(*command) for _ in range(2)] == [1, 1]


async def test_an_upload_with_a_chunk_missing_is_refused(bus: Bus) -> None:
    one, arrays = entry()
    await bus.library._upload(bus.keys.library_arrays("", "part"), arrays)
    command = Script("library_put")(
        bus.library._all("", "part"), one.name, msgspec.msgpack.encode(one), 2, FORMAT, 9, ""
    )
    assert await bus.command(*command) == [-2, 0]
    assert await bus.library.load("") == []


async def test_only_the_version_that_is_meant_is_followed(bus: Bus) -> None:
    assert await bus.library.put("", *entry(), replacing=0) == 1
    with pytest.raises(NewestDiffers) as differs:
        await bus.library.put("", *entry(), replacing=0)
    assert differs.value.version == 1
    assert await bus.library.put("", *entry(), replacing=1) == 2


async def test_of_clients_that_put_at_once_each_has_a_version_of_its_own(bus: Bus) -> None:
    versions: list[int] = []

    async def one() -> None:
        versions.append(await put(bus))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(one)
    assert sorted(versions) == list(range(1, 21))


async def test_spaces_have_names_of_their_own(bus: Bus) -> None:
    await put(bus, space="red")
    await put(bus, space="red")
    await put(bus, space="blue", vector=-VECTOR)
    assert await bus.library.load("") == []
    assert [one.version for one in await bus.library.load("red")] == [1, 2]
    (blue,) = await bus.library.load("blue")
    assert (await bus.library.fetch(blue, "vector") == -VECTOR).all()


async def test_a_full_space_is_refused(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    assert [await put(bus) for _ in range(2)] == [1, 2]
    with pytest.raises(LibraryFull, match="remove one"):
        await put(bus)
    await put(bus, space="red")


async def test_what_says_too_much_is_refused(bus: Bus) -> None:
    one, arrays = entry()
    one.description = "x" * module.MAX_DESCRIPTION_BYTES
    with pytest.raises(BusError, match="may take"):
        await bus.library.put("", one, arrays)


@pytest.mark.parametrize(
    ("about", "data"),
    [
        (b"", b""),
        (b"12 up 1", None),
        (b"12 up 1", b"\xc1"),
        (b"12 up 99", None),
        (b"x up 1", b"\x80"),
        (b"12 up 1", msgspec.msgpack.encode(entry("else")[0])),
        (b"12 up 1 13 op", None),
    ],
)
async def test_what_cannot_be_read_is_left_out_of_the_list(bus: Bus, about: bytes, data: bytes | None) -> None:
    await put(bus, "good")
    await bus.command("HSET", bus.keys.library("about", ""), "bad@1", about)
    if data is not None:
        await bus.command("HSET", bus.keys.library("entries", ""), "bad@1", data)
    assert [one.name for one in await bus.library.load("")] == ["good"]
    with pytest.raises(Malformed):
        await bus.library.find("", "bad", 1)


async def test_arrays_that_were_changed_are_not_handed_out(bus: Bus) -> None:
    await put(bus)
    stored = await found(bus)
    await bus.command("HSET", bus.keys.library_arrays("", stored.upload), "vector:0", (-VECTOR).tobytes())
    with pytest.raises(EntryMissing, match="does not match"):
        await bus.library.fetch(stored, "vector")
    with pytest.raises(EntryMissing, match="no array 'other'"):
        await bus.library.fetch(stored, "other")


@pytest.mark.parametrize("version", BINARIES)
async def test_a_tenant_changes_its_own_space_and_reads_the_shared_one(version: str) -> None:
    reads = int(version.split(".")[0]) >= 7
    async with running_servers(version) as servers:
        server = await servers.start()
        for name, role, tenant in (
            ("all", "controller", ""),
            ("red", "controller", "red"),
            ("sees", "consumer", "red"),
        ):
            words = rules(role, server="7" if reads else "6.2", tenant=tenant).split()  # type: ignore[arg-type]
            await server.ask("ACL", "SETUSER", name, *words, ">secret")
        async with AsyncExitStack() as stack:
            everything, red, sees, anybody = [
                await stack.enter_async_context(Bus.open(f"redis://{user}{server.address}"))
                for user in ("all:secret@", "red:secret@", "sees:secret@", "")
            ]
            # Users load no scripts.
            await anybody.registry.load_scripts()
            await put(everything)
            await put(everything, space="blue")
            await put(red, space="red")
            assert (await red.library.fetch(await found(red), "vector") == VECTOR).all()
            assert len(await sees.library.load("red")) == 1
            refused = [put(red, space="blue"), red.library.load("blue"), red.library.find("blue", "calm")]
            # The older server does not tell reading from writing.
            refused += [put(red), red.library.remove(await found(red), "red"), put(sees, space="red")] if reads else []
            for action in refused:
                with pytest.raises(NotAllowed):
                    await action


@pytest.mark.parametrize("name", ["calm", "a.b-c_9", "x" * 64])
def test_names(name: str) -> None:
    assert is_entry_name(name)
    assert not is_entry_name(name + "@1")


@pytest.mark.parametrize("name", ["", "-a", "a@1", "a b", "x" * 65, "a:b"])
def test_what_is_no_name(name: str) -> None:
    assert not is_entry_name(name)


def test_spaces_cannot_reach_into_others() -> None:
    assert is_space("")
    assert is_space("red")
    assert not is_space("red:")
    assert not is_space("a}b")
