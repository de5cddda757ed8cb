"""`client.library` on a real Redis: entries that are put, found, loaded, listed and removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tracewire
from tracewire import Client, EntryConflict, InvalidEntry, UnknownEntry
from tracewire_bus.bus import Bus
from tracewire_bus.store import library as store

VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)


async def test_what_is_put_can_be_loaded_by_another_client(client: Client, embedded: str, prefix: str) -> None:
    said: Any = {
        "model": "tiny",
        "at": "residual(2)",
        "licence": "MIT",
        "provenance": {"method": "by hand", "prompts": [1, 2]},
        "effect": {"score": 0.5},
        "description": "towards calm",
    }
    entry = await client.library.put("calm", VECTOR, **said)
    assert (entry.id, entry.version, entry.kind, entry.by) == ("calm@1", 1, "vector", "one")
    assert {name: getattr(entry, name) for name in said} == said
    async with tracewire.connect(embedded, prefix=prefix, name="two") as other:
        assert await other.library.get("calm") == entry
        arrays = await other.library.load("calm@1")
    assert list(arrays) == ["vector"]
    assert (arrays["vector"] == VECTOR).all()
    arrays["vector"][0] = 3


async def test_names_have_versions_and_a_history(client: Client) -> None:
    for number in range(3):
        await client.library.put("calm", VECTOR * number)
    await client.library.put("other", VECTOR)
    assert [one.id for one in await client.library.list()] == ["calm@1", "calm@2", "calm@3", "other@1"]
    assert (await client.library.load("calm"))["vector"][0] == -2
    assert await client.library.remove("calm@2") == ["calm@2"]
    with pytest.raises(UnknownEntry, match="one has removed it"):
        await client.library.get("calm@2")
    history = await client.library.history("calm")
    assert [(one.version, one.removed is None) for one in history] == [(3, True), (2, False), (1, True)]
    assert await client.library.remove("calm") == ["calm@1", "calm@3"]
    with pytest.raises(UnknownEntry, match="no entry 'calm'"):
        await client.library.remove("calm")
    assert (await client.library.put("calm", VECTOR)).version == 4


async def test_tenants_have_names_of_their_own(client: Client) -> None:
    await client.library.put("calm", VECTOR)
    await client.library.put("red:calm", -VECTOR)
    assert [one.id for one in await client.library.list()] == ["calm@1"]
    assert [one.id for one in await client.library.list("red")] == ["red:calm@1", "calm@1"]
    assert (await client.library.load("red:calm"))["vector"][0] == 1


async def test_a_change_may_expect_a_version(client: Client) -> None:
    await client.library.put("calm", VECTOR, replacing=0)
    with pytest.raises(EntryConflict, match="'calm' is at version 1") as conflict:
        await client.library.put("calm", VECTOR, replacing=0)
    assert conflict.value.version == 1
    with pytest.raises(InvalidEntry) as refused:
        await client.library.put("calm", VECTOR, replacing=-1)
    assert refused.value.field == "replacing"


async def test_a_full_library_says_so(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_ENTRIES", 1)
    await client.library.put("calm", VECTOR)
    with pytest.raises(EntryConflict, match="remove one first"):
        await client.library.put("calm", VECTOR)


@pytest.mark.parametrize("name", ["", "a b", "calm@", "calm@0", "calm@x", "red:", ":calm", "a/b"])
async def test_what_is_no_name(client: Client, name: str) -> None:
    for call in (client.library.get(name), client.library.put(name, VECTOR), client.library.remove(name)):
        with pytest.raises(InvalidEntry) as refused:
            await call
        assert refused.value.field == "name"


async def test_a_version_cannot_be_chosen(client: Client) -> None:
    with pytest.raises(InvalidEntry, match="without a version"):
        await client.library.put("calm@3", VECTOR)


async def test_an_unknown_option_is_named(client: Client) -> None:
    with pytest.raises(tracewire.UnknownOption, match="licence"):
        await client.library.put("calm", VECTOR, license="MIT")  # type: ignore[call-arg]


async def test_arrays_that_redis_has_lost_are_missing(client: Client, bus: Bus) -> None:
    await client.library.put("calm", VECTOR)
    stored = await bus.library.find("", "calm")
    assert stored is not None
    await bus.command("DEL", bus.keys.library_arrays("", stored.upload))
    with pytest.raises(UnknownEntry, match="its arrays are gone"):
        await client.library.load("calm")


def test_the_blocking_client_has_it_too(embedded: str, prefix: str) -> None:
    with tracewire.blocking.Client(embedded, prefix=prefix) as client:
        assert client.library.put("calm", VECTOR).id == "calm@1"
        assert [one.id for one in client.library.list()] == ["calm@1"]
        assert client.library.load("calm")["vector"].shape == (8,)
        assert client.library.remove("calm") == ["calm@1"]
