"""Files and folders of vectors, probes and autoencoders, of Tracewire and of other tools.

`read` takes a `.npy`, `.npz`, `.safetensors` or `.gguf` file, or a folder: a snapshot of a repository of the hub.
`write` makes a `.safetensors` file, which `read` turns into the same entry again, or a `.gguf` control vector.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tracewire.errors import InvalidEntry

from . import gguf_files
from .entry import PLAIN, LibraryEntry
from .packages import package

if TYPE_CHECKING:
    import numpy as np

__all__ = ["READS", "WRITES", "VectorFile", "read", "write"]

READS: Final = (".npy", ".npz", ".safetensors", ".gguf")
WRITES: Final = (".safetensors", ".gguf")

#: The metadata of a `.safetensors` file that has an entry's description.
_METADATA: Final = "tracewire.entry"
#: Names of arrays, or of files, that mean one layer each: `direction.7`, `layer_7`, `layers.7.vector`, `7`.
_LAYER: Final = re.compile(r"(?:(?:direction|vector|layers?|blocks?|residual|steering)[._-]?)?(\d+)(?:\.[A-Za-z_]+)?")
_HOOK: Final = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")
#: The front matter of a model card, between two lines of dashes.
_CARD: Final = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


class VectorFile(NamedTuple):
    """What a file holds, as `Library.put` takes it.

    Attributes:
        arrays: one array, or arrays by layer or name.
        options: what the file says about itself, by the names of `EntryOptions`.
    """

    arrays: Any
    options: dict[str, Any]


def read(path: str | Path) -> VectorFile:
    """Read a file or a folder.

    A folder has one such file; or one for each layer, such as `layer_7.npy`; or an autoencoder in SAELens's layout,
    `cfg.json` beside `sae_weights.safetensors`. The licence and the base model come from the front matter of its
    `README.md`.

    Raises:
        InvalidEntry: the file cannot be read, or does not have what an entry needs.
        LibraryMissing: the package that reads it is not installed.
    """
    path = Path(path)
    found = _folder(path) if path.is_dir() else _file(path)
    found.options.setdefault("provenance", {}).setdefault("file", path.name)
    return found


def write(path: str | Path, entry: LibraryEntry, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write an entry with its arrays, as `Library.load` returned them.

    Raises:
        InvalidEntry: the format cannot hold the entry.
        LibraryMissing: the package that writes it is not installed.
    """
    import numpy as np

    path = Path(path)
    if path.suffix == ".gguf":
        gguf_files.write(path, entry, arrays)
        return
    if path.suffix != ".safetensors":
        raise InvalidEntry(entry.id, "to", f"expected a file that ends with {' or '.join(WRITES)}, got {path.name!r}")
    kept = ("name", "version", "kind", "model", "at", "description", "licence", "provenance", "effect", "settings")
    said = {name: getattr(entry, name) for name in kept}
    metadata = {_METADATA: json.dumps({**said, "digest": entry.digest}, ensure_ascii=False)}
    data: bytes = package("safetensors.numpy").save(
        {name: np.asarray(array) for name, array in arrays.items()}, metadata
    )
    path.write_bytes(data)


def _file(path: Path) -> VectorFile:
    loaders = {".npy": _numpy, ".npz": _numpy, ".safetensors": _safetensors, ".gguf": gguf_files.read}
    if path.suffix not in loaders:
        raise InvalidEntry(
            path.name, "file", f"expected a folder, or a file that ends with {', '.join(READS)}, got {path.name!r}"
        )
    try:
        arrays, options = loaders[path.suffix](path)
    except OSError as error:
        raise InvalidEntry(path.name, "file", f"it cannot be read: {error.strerror or error}") from None
    except (InvalidEntry, ImportError):
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        raise InvalidEntry(path.name, "file", f"it cannot be read: {error}") from None
    return _recognised(path.name, arrays, options)


def _numpy(path: Path) -> tuple[Any, dict[str, Any]]:
    import numpy as np

    loaded = np.load(path, allow_pickle=False)
    return (dict(loaded), {}) if path.suffix == ".npz" else (loaded, {})


def _safetensors(path: Path) -> tuple[Any, dict[str, Any]]:
    with package("safetensors").safe_open(path, "numpy") as file:
        said = (file.metadata() or {}).get(_METADATA)
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    options = {}
    if said is not None:
        options = json.loads(said)
        options["provenance"] = {**options.get("provenance", {}), "digest": options.pop("digest", "")}
        for name in ("name", "version"):
            options.pop(name, None)
    return arrays, options


def _recognised(name: str, arrays: Any, options: dict[str, Any]) -> VectorFile:
    """Arrays as `Library.put` takes them, by what their names say."""
    if not isinstance(arrays, Mapping):
        return VectorFile(arrays, {"kind": "vector" if arrays.ndim == 1 else "subspace", **options})
    if not arrays:
        raise InvalidEntry(name, "file", "expected at least one array, got none")
    kinds = {plain: kind for kind, (plain, _) in PLAIN.items()}
    first = {key.partition(".")[0] for key in arrays}
    if options.get("kind"):
        return VectorFile(arrays, options)
    if {"W_enc", "W_dec"} <= first:
        return VectorFile(arrays, {"kind": "autoencoder", **options})
    if first <= {"weight", "bias"}:
        return VectorFile(arrays, {"kind": "probe", **options})
    if len(first) == 1 and (kind := kinds.get(next(iter(first)))):
        return VectorFile(arrays, {"kind": kind, **options})
    if (layers := _by_layer(arrays)) is not None:
        return VectorFile(layers, {"kind": "vector", **options})
    if len(arrays) == 1:
        return _recognised(name, next(iter(arrays.values())), options)
    there = ", ".join(sorted(arrays)[:8])
    raise InvalidEntry(name, "file", f"expected one array, or one for each layer (direction.7, ...), got {there}")


def _by_layer(arrays: Mapping[str, Any]) -> dict[int, Any] | None:
    matches = {key: _LAYER.fullmatch(key) for key in arrays}
    if any(match is None for match in matches.values()):
        return None
    found = {int(match[1]): arrays[key] for key, match in matches.items() if match is not None}
    return found if len(found) == len(arrays) else None


# --- folders ----------------------------------------------------------------------------------------------------------


def _folder(path: Path) -> VectorFile:
    card = _card(path / "README.md")
    if (path / "cfg.json").is_file():
        found = _saelens(path)
    else:
        files = sorted(one for one in path.iterdir() if one.suffix in READS)
        numbered = {one: _LAYER.fullmatch(one.stem) for one in files}
        if len(files) > 1 and all(numbered.values()):
            layers = {int(match[1]): _only(one) for one, match in numbered.items() if match is not None}
            found = VectorFile(layers, {"kind": "vector"})
        elif len(files) == 1:
            found = _file(files[0])
        else:
            raise InvalidEntry(
                path.name, "file", f"expected one file of {', '.join(READS)}, or one a layer, got {_listed(files)}"
            )
    for field, value in card.items():
        found.options[field] = found.options.get(field) or value
    return found


def _only(path: Path) -> Any:
    arrays = _file(path).arrays
    if isinstance(arrays, Mapping):
        if len(arrays) != 1:
            raise InvalidEntry(path.name, "file", f"expected one array in the file of one layer, got {len(arrays)}")
        return next(iter(arrays.values()))
    return arrays


def _saelens(path: Path) -> VectorFile:
    """An autoencoder in SAELens's layout."""
    try:
        config = json.loads((path / "cfg.json").read_text())
        arrays, _ = _safetensors(path / "sae_weights.safetensors")
    except (OSError, ValueError) as error:
        raise InvalidEntry(path.name, "file", f"expected SAELens's layout: {error}") from None
    more = config.get("metadata") or {}
    hook = config.get("hook_name") or more.get("hook_name") or ""
    options: dict[str, Any] = {"kind": "autoencoder", "settings": config}
    options["model"] = config.get("model_name") or more.get("model_name") or ""
    if (match := _HOOK.fullmatch(hook)) is not None:
        layer = int(match[1]) - (match[2] == "pre")
        options["at"] = f"residual({layer})" if layer >= 0 else ""
    return VectorFile(arrays, options)


def _card(path: Path) -> dict[str, str]:
    """The licence and the base model of a model card."""
    match = _CARD.match(path.read_text()) if path.is_file() else None
    lines = (line.partition(":") for line in (match[1].splitlines() if match else ()))
    said = {key.strip(): value.strip().strip("'\"") for key, _, value in lines if value.strip()}
    wanted = {"licence": said.get("license"), "model": said.get("base_model")}
    return {field: value for field, value in wanted.items() if value}


def _listed(files: Iterable[Path]) -> str:
    return ", ".join(one.name for one in files) or "none"
