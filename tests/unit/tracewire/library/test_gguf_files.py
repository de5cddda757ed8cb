"""GGUF control vectors: as other programs write them, and as the library writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tracewire import InvalidEntry, LibraryEntry
from tracewire.library import files

VECTOR = np.linspace(-1, 1, 8, dtype=np.float32)


def control_vector(path: Path, architecture: str = "controlvector") -> Path:
    """A control vector of layers 1 to 3, as repeng's export writes it."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 3)
    for layer in (1, 2, 3):
        writer.add_tensor(f"direction.{layer}", VECTOR * layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_control_vector_has_a_vector_for_each_layer(tmp_path: Path) -> None:
    found = files.read(control_vector(tmp_path / "honest.gguf"))
    assert {layer: array[0] for layer, array in found.arrays.items()} == {1: -1, 2: -2, 3: -3}
    assert found.options["kind"] == "vector"
    assert found.options["provenance"] == {
        "format": "gguf control vector",
        "model_hint": "llama",
        "file": "honest.gguf",
    }


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    entry = LibraryEntry("calm@1", "", "calm", 1, kind="vector", model="tiny", layers=(2, 10))
    files.write(tmp_path / "calm.gguf", entry, {"vector.2": VECTOR, "vector.10": -VECTOR})
    found = files.read(tmp_path / "calm.gguf")
    assert {layer: array.tolist() for layer, array in found.arrays.items()} == {
        2: VECTOR.tolist(),
        10: (-VECTOR).tolist(),
    }
    assert found.options["provenance"]["model_hint"] == "tiny"


def test_a_vector_of_one_place_is_that_of_its_layer(tmp_path: Path) -> None:
    entry = LibraryEntry("calm@1", "", "calm", 1, kind="vector", at="residual(4)")
    files.write(tmp_path / "calm.gguf", entry, {"vector": VECTOR})
    assert list(files.read(tmp_path / "calm.gguf").arrays) == [4]


@pytest.mark.parametrize(
    ("changes", "field"), [({"kind": "probe"}, "kind"), ({"at": ""}, "at"), ({"at": "model.layers.3.mlp"}, "at")]
)
def test_what_is_no_control_vector_is_not_written(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    entry = LibraryEntry("calm@1", "", "calm", 1, **{"kind": "vector", "at": "residual(4)", **changes})
    with pytest.raises(InvalidEntry) as refused:
        files.write(tmp_path / "calm.gguf", entry, {"vector": VECTOR})
    assert refused.value.field == field
    assert not list(tmp_path.iterdir())


def test_a_model_is_no_control_vector(tmp_path: Path) -> None:
    path = control_vector(tmp_path / "model.gguf", "llama")
    with pytest.raises(InvalidEntry, match="expected a GGUF of 'controlvector', got one of 'llama'"):
        files.read(path)
