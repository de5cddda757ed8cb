"""A library that is not installed is an error that names the extra."""

from __future__ import annotations

import sys

import pytest

import tracewire
from tracewire.harvest.libraries import library


def test_a_library_that_is_there() -> None:
    assert library("pyarrow.parquet").__name__ == "pyarrow.parquet"


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(tracewire.LibraryMissing, match=r"a harvest needs pyarrow: pip install 'tracewire\[harvest\]'"):
        library("pyarrow.parquet")
