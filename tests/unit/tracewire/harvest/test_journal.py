"""The journal: what is committed counts, and one client at a time commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tracewire
from tests.support.harvests import failed
from tracewire.harvest.journal import Entry, File, Journal, checked_file, digest, file_digest
from tracewire.harvest.stores import Store

HEAD = {"model": "tiny", "sampling": {"max_tokens": 1}}


def journal(folder: Path) -> Journal:
    made = Journal(Store(folder))
    made.open(HEAD, {"tracewire": "0"})
    return made


def commit(into: Journal, *prompts: int, **more: Any) -> str:
    """Commit a shard of one file."""
    name = f"shards/{into.shard_name()}.safetensors"
    into.store.put(name, b"values")
    file = File(name, 6, file_digest(b"values"))
    into.commit(Entry(0, files=[file], prompts=list(prompts), digests=[f"d{key}" for key in prompts], **more))
    return name


def test_what_was_committed_is_read_again(tmp_path: Path) -> None:
    first = journal(tmp_path)
    commit(first, 0, 1, failed=[failed(2)])
    commit(first, 3)
    again = journal(tmp_path)
    assert again.done == {0: "d0", 1: "d1", 3: "d3"}
    assert list(again.failed) == [2]
    assert again.next == 2
    assert [entry.prompts for entry in again] == [[0, 1], [3]]


def test_a_prompt_that_had_failed_is_in_a_later_shard(tmp_path: Path) -> None:
    first = journal(tmp_path)
    commit(first, 0, failed=[failed(1)])
    commit(first, 1)
    assert journal(tmp_path).failed == {}


def test_another_harvest_in_the_same_place_is_refused(tmp_path: Path) -> None:
    journal(tmp_path)
    with pytest.raises(tracewire.HarvestConflict, match='with another model: there "tiny", now "other"'):
        Journal(Store(tmp_path)).open({**HEAD, "model": "other"}, {})


def test_the_second_of_two_clients_cannot_commit(tmp_path: Path) -> None:
    first, second = journal(tmp_path), journal(tmp_path)
    commit(first, 0)
    with pytest.raises(tracewire.HarvestConflict, match="another client writes to it now"):
        commit(second, 0)
    assert journal(tmp_path).done == {0: "d0"}


@pytest.mark.parametrize("error", [FileExistsError("journal/000000.json"), tracewire.StoreUnavailable("u", "n", "r")])
def test_an_entry_that_was_written_although_the_store_failed_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A lost answer of the store, and a put that is tried again and sees its own first try."""
    first, create = journal(tmp_path), Store.create

    def fails(self: Store, name: str, data: bytes) -> None:
        create(self, name, data)
        raise error

    monkeypatch.setattr(Store, "create", fails)
    commit(first, 0, shard=first.shard_name())
    assert (first.next, first.done) == (1, {0: "d0"})
    assert journal(tmp_path).done == {0: "d0"}


def test_an_entry_that_cannot_be_read_back_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = journal(tmp_path), journal(tmp_path)
    commit(first, 0, shard=first.shard_name())

    def fails(self: Store, name: str) -> bytes:
        raise tracewire.StoreUnavailable(self.url, name, "away")

    monkeypatch.setattr(Store, "read", fails)
    with pytest.raises(tracewire.StoreUnavailable, match="away"):
        commit(second, 0, shard=second.shard_name())


def test_files_that_nobody_can_commit_any_more_are_removed(tmp_path: Path) -> None:
    first = journal(tmp_path)
    left = f"shards/{first.shard_name()}.safetensors"
    first.store.put(left, b"of a client that was killed")
    temporary = tmp_path / "shards" / f".{first.next:06}-ab.safetensors.12.tmp"
    temporary.write_bytes(b"cut sh")
    assert first.sweep() == 0  # another client may be about to commit it
    name = commit(first, 0)
    assert first.sweep() == 2
    assert list(first.store.sizes("shards")) == [name]
    assert list(first.store.sizes("journal")) == ["journal/000000.json"]


@pytest.mark.parametrize("how", ["cut short", "missing", "changed"])
def test_a_file_that_is_not_what_was_written(tmp_path: Path, how: str) -> None:
    first = journal(tmp_path)
    name, other = commit(first, 0, 1), commit(first, 2)
    path = tmp_path / name
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"val" if how == "cut short" else b"VALUES")
    again = journal(tmp_path)
    entry, whole = again.entries[0], again.entries[1]
    with pytest.raises(tracewire.ShardDamaged) as damaged:
        checked_file(again.store, entry, entry.files[0])
    assert (damaged.value.file, damaged.value.prompts) == (name, 2)
    assert checked_file(again.store, whole, whole.files[0]) == b"values"
    # A look at the sizes finds what is not there.
    assert list(again.damaged()) == ([] if how == "changed" else [0])
    again.drop([0])
    assert journal(tmp_path).done == {2: "d2"}
    journal(tmp_path).sweep()
    assert list(again.store.sizes("shards")) == [other]


def test_a_journal_that_is_damaged(tmp_path: Path) -> None:
    first = journal(tmp_path)
    for key in range(3):
        commit(first, key)
    entry = tmp_path / "journal" / "000001.json"
    whole = entry.read_bytes()
    entry.write_bytes(whole[:20])
    with pytest.raises(tracewire.ShardDamaged, match=r"journal/000001\.json.*no entry"):
        journal(tmp_path)
    entry.unlink()
    with pytest.raises(tracewire.ShardDamaged, match=r"journal/000001\.json.*missing"):
        journal(tmp_path)
    entry.write_bytes(whole)
    assert journal(tmp_path).next == 3


def test_where_there_is_no_harvest_or_one_of_a_newer_form(tmp_path: Path) -> None:
    with pytest.raises(tracewire.HarvestMissing):
        Journal(Store(tmp_path)).read()
    assert not Journal(Store(tmp_path)).exists()
    (tmp_path / "harvest.json").write_text('{"format": 3}')
    with pytest.raises(tracewire.HarvestConflict, match="format 3"):
        Journal(Store(tmp_path)).read()
    (tmp_path / "harvest.json").write_text("{")
    with pytest.raises(tracewire.ShardDamaged):
        Journal(Store(tmp_path)).read()


def test_a_harvest_of_the_first_format_is_read_and_goes_on(tmp_path: Path) -> None:
    first = journal(tmp_path)
    commit(first, 0)
    head = tmp_path / "harvest.json"
    head.write_text(head.read_text().replace('"format": 2', '"format": 1'))
    entry = tmp_path / "journal" / "000000.json"
    entry.write_text(entry.read_text().replace(file_digest(b"values"), digest(b"values")))
    again = journal(tmp_path)
    commit(again, 1)
    for one in again:
        assert checked_file(again.store, one, one.files[0]) == b"values"
    assert [one.files[0].digest for one in again] == [digest(b"values"), file_digest(b"values")]
