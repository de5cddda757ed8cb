"""A digest of a model's files, so that a recording can tell whether another engine runs the same weights.

It covers, in the order of their names:

- `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json`, in full;
- of each `.safetensors` file: its name, its size, its header (the tensors' names, dtypes, shapes and places), and its
  data: in full up to 16 MiB, else 64 samples of 64 KiB at equal distances, the first and the last bytes among them.

So the digest of a large model reads some 4 MiB a file. A change of a few weights of a large file between two samples
leaves it the same. LoRA adapters, quantisation that happens while a model is loaded, and remote code are not covered.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

__all__ = ["digest_of_files", "weights_digest"]

logger = logging.getLogger("tracewire")

_WHOLE: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WHOLE_BYTES: Final = 16 * 2**20
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 * 1024
_LONGEST_HEADER: Final = 100 * 2**20


def weights_digest(config: Any, load_format: str) -> str:
    """The digest of the files of vLLM's model config, in hexadecimal; `""` if they are not on this machine."""
    if load_format == "dummy":
        return ""
    try:
        folder = Path(config.model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
        return digest_of_files(folder)
    except Exception as error:  # a hub's cache may lack files, or be unreadable
        logger.info("the model's files have no digest: %s", error)
        return ""


def digest_of_files(folder: Path) -> str:
    """The digest of the model in a folder, in hexadecimal; `""` if it has no safetensors.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return ""
    found = blake2b(digest_size=16)
    for name in _WHOLE:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            found.update(f"{name}\0{len(data)}\0".encode() + data)
    for path in weights:
        _add_weights(found, path)
    return found.hexdigest()


def _add_weights(found: Any, path: Path) -> None:
    size = path.stat().st_size
    found.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            found.update(file.read())
            return
        header = int.from_bytes(file.read(8), "little")
        if header > min(size, _LONGEST_HEADER):
            raise ValueError(f"{path}: expected safetensors, got a header of {header} bytes")
        found.update(file.read(header))
        first = 8 + header
        distance = max(0, size - _SAMPLE_BYTES - first) / (_SAMPLES - 1)
        for number in range(_SAMPLES):
            file.seek(first + round(number * distance))
            found.update(file.read(_SAMPLE_BYTES))
