"""Files appear whole or not at all, in a folder and in an object store, and each failure is an error of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracewire
from tests.support import ROOT
from tests.support.harvests import s3_server
from tracewire.harvest.stores import Store


def test_files_of_a_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "acts")
    store.create("harvest.json", b"{}")
    store.put("shards/a", b"first")
    store.put("shards/a", b"sec", memoryview(b"on"), b"d")
    store.create("journal/0", b"0")
    assert store.read("shards/a") == b"second"
    assert store.sizes("shards") == {"shards/a": 6}
    assert store.sizes("nothing") == {}
    with pytest.raises(FileExistsError):
        store.create("journal/0", b"1")
    assert store.read("journal/0") == b"0"
    with pytest.raises(FileNotFoundError):
        store.read("shards/b")
    store.remove("shards/a")
    store.remove("shards/a")
    # Nothing is left under another name.
    assert sorted(path.name for path in (tmp_path / "acts").rglob("*") if path.is_file()) == ["0", "harvest.json"]


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    store = Store(tmp_path / "acts")
    store.create("harvest.json", b"{}")
    with pytest.raises(FileExistsError):
        store.create("harvest.json", b"")
    assert store.read("harvest.json") == b"{}"


def test_files_of_any_kind_of_store() -> None:
    store = Store("memory://harvests/acts")
    store.create("harvest.json", b"{}")
    store.put("shards/a", b"one")
    with pytest.raises(FileExistsError):
        store.create("harvest.json", b"")
    assert store.sizes("shards") == {"shards/a": 3}
    assert store.read("harvest.json") == b"{}"


def test_files_of_s3_its_refusals_and_its_end() -> None:
    with s3_server() as (process, options):
        store = Store("s3://acts/run", options)
        store.create("journal/0", b"0")
        store.put("shards/a", b"one")
        assert store.sizes("shards") == {"shards/a": 3}
        with pytest.raises(FileExistsError):
            store.create("journal/0", b"1")
        # Of two clients that both find the name free, the store itself refuses the second.
        store._files.exists = lambda path: False
        with pytest.raises(FileExistsError):
            store.create("journal/0", b"1")
        assert store.read("journal/0") == b"0"
        with pytest.raises(tracewire.StoreRefused, match="signature") as refused:
            Store("s3://acts/run", {**options, "secret": "wrong"}).put("shards/b", b"two")
        assert (refused.value.to, refused.value.file) == ("s3://acts/run", "shards/b")
        with pytest.raises(tracewire.StoreUnavailable, match="bucket does not exist"):
            Store("s3://other/run", options).put("shards/b", b"two")
        process.kill()
        process.wait()
        with pytest.raises(tracewire.StoreUnavailable, match="connect"):
            store.put("shards/b", b"two")


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "acts")
    store.create("harvest.json", b"{}")
    (tmp_path / "acts" / "harvest.json").unlink()
    (tmp_path / "acts").rmdir()
    with pytest.raises(tracewire.StoreUnavailable, match=r"shards/a: FileNotFoundError"):
        store.put("shards/a", b"one")


#: A program that writes files until it cannot, in a file system of its own.
WRITES = """
import sys
from tracewire.harvest.stores import Store
store = Store(sys.argv[1])
try:
    for number in range(100):
        store.put(f"{number}", bytes(10_000))
except Exception as error:
    whole = all(len(store.read(name)) == 10_000 for name in store.sizes("."))
    print(type(error).__name__, error.file == f"{number}", whole, len(store.sizes(".")) == number)
"""


@pytest.mark.parametrize(
    ("mount", "error"), [("size=65536", "StoreFull True True True"), ("ro", "StoreRefused True True True")]
)
def test_a_file_system_that_is_full_or_read_only(tmp_path: Path, mount: str, error: str) -> None:
    script = f'mount -t tmpfs -o {mount} tmpfs "$1" && exec "$2" -c "$3" "$1"'
    arguments = ["sh", str(tmp_path), sys.executable, WRITES]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == error, done.stderr


def test_urls_that_fsspec_does_not_know() -> None:
    with pytest.raises(ValueError, match="to: Protocol not known: nothing"):
        Store("nothing://acts")
