"""Vectors of options, from `.npy`, `.safetensors` and `.json` files."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["SUFFIXES", "is_file", "load_vector"]

SUFFIXES = (".npy", ".safetensors", ".json")


def is_file(text: str) -> bool:
    """Whether `text` names a file, or an array in one, as `load_vector` takes it, whether the file is there or not."""
    return Path(text).suffix in SUFFIXES or Path(text.rpartition(":")[0]).suffix in SUFFIXES or Path(text).exists()


def load_vector(text: str) -> np.ndarray[Any, Any]:
    """The array that `text` names: `FILE.npy`, `FILE.json`, `FILE.safetensors`, or `FILE.safetensors:NAME`.

    A JSON file has a list of numbers, or an object of such lists by name.

    Raises:
        ValueError: there is no such file or array, or its elements are not finite numbers.
    """
    import numpy as np

    name, key = text, ""
    if not Path(text).exists() and Path(text.rpartition(":")[0]).suffix in SUFFIXES:
        name, _, key = text.rpartition(":")
    path = Path(name)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"expected a file that ends with {', '.join(SUFFIXES)}, got {name!r}")
    try:
        loaded = _LOADERS[path.suffix](path)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from None
    except ImportError:
        raise ValueError(f"{name}: reading it needs safetensors: pip install 'tracewire[harvest]'") from None
    except Exception as error:  # each library has errors of its own for a damaged file
        raise ValueError(f"{name} cannot be read: {error}") from None
    array = np.asarray(_chosen(loaded, key, name))
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name}: expected numbers, got elements of {array.dtype.name}")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity among them")
    return array


def _chosen(loaded: Any, key: str, name: str) -> Any:
    if not isinstance(loaded, dict):
        if key:
            raise ValueError(f"{name}: it has one array and no names; got the name {key!r}")
        return loaded
    if not key and len(loaded) == 1:
        return next(iter(loaded.values()))
    if key not in loaded:
        there = ", ".join(sorted(loaded)) or "none"
        asked = f"no array {key!r}" if key else "several arrays, so one must be named"
        raise ValueError(f"{name} has {asked}, as in {name}:NAME (it has: {there})")
    return loaded[key]


def _npy(path: Path) -> Any:
    import numpy as np

    return np.load(path, allow_pickle=False)


def _json(path: Path) -> Any:
    import numpy as np

    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else np.asarray(found, np.float32)


def _safetensors(path: Path) -> Any:
    return import_module("safetensors.numpy").load(path.read_bytes())


_LOADERS = {".npy": _npy, ".json": _json, ".safetensors": _safetensors}
