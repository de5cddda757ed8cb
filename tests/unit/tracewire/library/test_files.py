"""Files and folders of vectors: what each holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tracewire import InvalidEntry, LibraryEntry
from tracewire.library import files

VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)
LAYERS = {1: VECTOR, 12: -VECTOR}


def test_numpys_files(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", VECTOR)
    np.save(tmp_path / "rows.npy", np.eye(2, 8))
    np.savez(tmp_path / "layers.npz", **{f"layer_{layer}": array for layer, array in LAYERS.items()})
    np.savez(tmp_path / "probe.npz", weight=VECTOR, bias=np.float32(1))
    assert (files.read(tmp_path / "one.npy").arrays == VECTOR).all()
    assert files.read(tmp_path / "one.npy").options == {"kind": "vector", "provenance": {"file": "one.npy"}}
    assert files.read(tmp_path / "rows.npy").options["kind"] == "subspace"
    assert sorted(files.read(tmp_path / "layers.npz").arrays) == [1, 12]
    assert files.read(tmp_path / "probe.npz").options["kind"] == "probe"


@pytest.mark.parametrize("form", ["{}", "direction.{}", "layers.{}.vector", "layer_{}", "residual-{}"])
def test_tensors_by_layer(tmp_path: Path, form: str) -> None:
    save_file({form.format(layer): array for layer, array in LAYERS.items()}, tmp_path / "v.safetensors")
    found = files.read(tmp_path / "v.safetensors")
    assert found.options["kind"] == "vector"
    assert {layer: array.tolist() for layer, array in found.arrays.items()} == {
        layer: array.tolist() for layer, array in LAYERS.items()
    }


def test_an_exported_entry_is_the_same_again(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "kind": "probe",
        "model": "tiny",
        "at": "residual(2)",
        "licence": "MIT",
        "description": "what it is",
        "provenance": {"method": "logistic"},
        "effect": {"accuracy": 0.9},
        "settings": {"threshold": 0.5},
    }
    entry = LibraryEntry("calm@3", "", "calm", 3, digest="d0", **said)
    files.write(tmp_path / "calm.safetensors", entry, {"weight": VECTOR, "bias": np.float32(1.5)})
    found = files.read(tmp_path / "calm.safetensors")
    assert found.options == {
        **said,
        "provenance": {"method": "logistic", "digest": "d0", "file": "calm.safetensors"},
    }
    assert (found.arrays["weight"] == VECTOR).all()
    assert found.arrays["bias"] == 1.5


def test_a_folder_with_one_file_and_a_model_card(tmp_path: Path) -> None:
    np.save(tmp_path / "direction.npy", VECTOR)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: org/tiny\ntags:\n- steering\n---\n# Calm\n")
    found = files.read(tmp_path)
    assert (found.arrays == VECTOR).all()
    assert (found.options["licence"], found.options["model"]) == ("mit", "org/tiny")


def test_a_folder_with_a_file_for_each_layer(tmp_path: Path) -> None:
    for layer, array in LAYERS.items():
        np.save(tmp_path / f"layer_{layer}.npy", array)
    assert sorted(files.read(tmp_path).arrays) == [1, 12]


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("blocks.7.hook_resid_post", "residual(7)"),
        ("blocks.7.hook_resid_pre", "residual(6)"),
        ("blocks.0.hook_resid_pre", ""),
        ("blocks.7.hook_mlp_out", None),
    ],
)
def test_an_autoencoder_in_saelens_layout(tmp_path: Path, hook: str, at: str | None) -> None:
    config = {"architecture": "standard", "d_in": 8, "d_sae": 16, "model_name": "gpt2-small", "hook_name": hook}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    arrays = {"W_enc": np.eye(8, 16), "W_dec": np.eye(16, 8), "b_enc": np.zeros(16), "b_dec": np.zeros(8)}
    save_file(arrays, tmp_path / "sae_weights.safetensors")
    found = files.read(tmp_path)
    assert sorted(found.arrays) == sorted(arrays)
    assert (found.options["kind"], found.options["model"], found.options.get("at")) == ("autoencoder", "gpt2-small", at)
    assert found.options["settings"] == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"nothing", "cannot be read"),
        ("a.safetensors", b"nothing", "cannot be read"),
        ("a.gguf", b"nothing", "cannot be read"),
        ("a.pt", b"", "expected a folder, or a file that ends with"),
        ("gone.npy", None, "No such file"),
        ("gone.safetensors", None, "cannot be read"),
        ("gone.gguf", None, "no such file"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidEntry, match=message) as refused:
        files.read(tmp_path / name)
    assert refused.value.field == "file"


def test_objects_that_are_pickled_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidEntry, match="cannot be read"):
        files.read(tmp_path / "a.npy")


def test_arrays_without_a_meaning_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", this=VECTOR, that=VECTOR)
    with pytest.raises(InvalidEntry, match="got that, this"):
        files.read(tmp_path / "a.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidEntry, match="got none"):
        files.read(tmp_path / "empty")


def test_another_format_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidEntry) as refused:
        files.write(tmp_path / "calm.pt", LibraryEntry("calm@1", "", "calm", 1), {})
    assert refused.value.field == "to"
