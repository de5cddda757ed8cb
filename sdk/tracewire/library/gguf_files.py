"""GGUF control vectors, as llama.cpp reads them and repeng writes them: a tensor `direction.N` for each layer N.

The vector of layer N is added to the residual stream after decoder layer N, which is `residual(N)`. llama.cpp applies
none for layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracewire.errors import InvalidEntry

from .entry import LibraryEntry
from .packages import package

if TYPE_CHECKING:
    import numpy as np

__all__ = ["read", "write"]

_ARCHITECTURE = "controlvector"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The directions of a control vector by their names in the file, and what it says about itself.

    Raises:
        InvalidEntry: the file is no control vector.
        LibraryMissing: the package `gguf` is not installed.
    """
    import numpy as np

    if not path.is_file():
        raise InvalidEntry(path.name, "file", "there is no such file")
    file = package("gguf").GGUFReader(path)
    architecture = _text(file, "general.architecture")
    if architecture != _ARCHITECTURE:
        raise InvalidEntry(path.name, "file", f"expected a GGUF of {_ARCHITECTURE!r}, got one of {architecture!r}")
    arrays = {one.name: np.array(one.data, np.float32) for one in file.tensors}
    hint = _text(file, "controlvector.model_hint")
    return arrays, {"provenance": {"format": "gguf control vector", "model_hint": hint}}


def _text(file: Any, name: str) -> str:
    field = file.get_field(name)
    return "" if field is None else str(field.contents())


def write(path: Path, entry: LibraryEntry, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a vector as a control vector.

    Raises:
        InvalidEntry: the entry is no vector, or has no layer.
        LibraryMissing: the package `gguf` is not installed.
    """
    import numpy as np

    if entry.kind != "vector":
        raise InvalidEntry(entry.id, "kind", f"a control vector is of the kind 'vector', not {entry.kind!r}")
    layers = {int(name.rpartition(".")[2]): array for name, array in arrays.items() if name != "vector"}
    if "vector" in arrays:
        one = re.fullmatch(r"residual\((\d+)\)", entry.at)
        if one is None:
            raise InvalidEntry(entry.id, "at", f"a control vector belongs to layers, as residual(4), not {entry.at!r}")
        layers = {int(one[1]): arrays["vector"]}
    writer = package("gguf").GGUFWriter(str(path), _ARCHITECTURE)
    writer.add_string("controlvector.model_hint", entry.provenance.get("model_hint") or entry.model)
    writer.add_uint32("controlvector.layer_count", len(layers))
    for layer, array in sorted(layers.items()):
        writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
