"""Vectors are read from files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tracewire.cli.vectors import load_vector

VALUES = [1.0, -2.0, 0.5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the same vector in each form, and with files that are wrong."""
    np.save(tmp_path / "a.npy", np.array(VALUES))
    np.save(tmp_path / "whole.npy", np.array([1, -2]))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    np.save(tmp_path / "nan.npy", np.array([np.nan]))
    (tmp_path / "a.json").write_text(json.dumps(VALUES))
    (tmp_path / "two.json").write_text(json.dumps({"a": VALUES, "b": [1]}))
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "broken.npy").write_text("no array")
    save_file({"a": np.array(VALUES, np.float32)}, tmp_path / "a.safetensors")
    save_file({"a": np.array(VALUES, np.float16), "b": np.ones(1)}, tmp_path / "two.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["a.npy", "a.json", "two.json:a", "a.safetensors", "a.safetensors:a", "two.safetensors:a"]
)
def test_each_form(folder: Path, name: str) -> None:
    found = load_vector(str(folder / name))
    assert found.tolist() == VALUES
    assert found.dtype == np.float32


def test_whole_numbers_become_floats(folder: Path) -> None:
    assert load_vector(str(folder / "whole.npy")).dtype == np.float32


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.npy", "No such file"),
        ("a.txt", "expected a file that ends with .npy, .safetensors, .json"),
        ("a.npy:x", "it has one array and no names; got the name 'x'"),
        ("two.json", "several arrays, so one must be named"),
        ("two.safetensors:c", "no array 'c', as in"),
        ("broken.json", "cannot be read"),
        ("broken.npy", "cannot be read"),
        ("text.npy", "expected numbers"),
        ("nan.npy", "expected finite numbers"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, name: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_vector(str(folder / name))
    assert says in str(caught.value)
    assert name.partition(":")[0] in str(caught.value)


def test_safetensors_may_be_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    with pytest.raises(ValueError, match=r"needs safetensors: pip install 'tracewire\[harvest\]'"):
        load_vector(str(folder / "a.safetensors"))
