"""The vectors of declared interventions on the device: equal ones are there once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracewire_bus.wire.arrays import array_from_raw
from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import InputFolder, used_file, vector_path
from tracewire_engine.worker.tensors import to_tensors

from .autoencoder_store import AutoencoderStore
from .kept_rows import KeptStore

__all__ = ["VectorCache"]

#: Bytes of vectors kept on the device for further requests that bring the same ones.
CACHE_BYTES = 256 * 1024 * 1024


class VectorCache:
    """Vectors on the device, float32, by the digest of their source: equal vectors are there once.

    A reference stands for the vector in the file that it names in `folder` (`vector_files.py` in the adapter).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.folder: InputFolder = Path()
        self._vectors: OrderedDict[tuple[str, bytes], torch.Tensor] = OrderedDict()
        self._bytes = 0
        self.autoencoders = AutoencoderStore(device)
        self.kept = KeptStore()
        #: Is called with each vector that is not kept any more.
        self.dropped: Callable[[torch.Tensor], None] = lambda vector: None

    def get(
        self, purpose: str, value: Any, make: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> torch.Tensor:
        """`make(value)` on the device. `purpose` names what `make` does, and is part of the key.

        Raises:
            OSError: `value` refers to a vector whose file is not there.
        """
        key = purpose, source_key(value)
        found = self._vectors.get(key)
        if found is None:
            made = np.array(make(self.read(value).astype(np.float32)), dtype=np.float32)
            found = self._vectors[key] = to_tensors(made, self.device)
            self._bytes += found.nbytes
            while self._bytes > CACHE_BYTES and len(self._vectors) > 1:
                _, last = self._vectors.popitem(last=False)
                self._bytes -= last.nbytes
                self.dropped(last)
        else:
            self._vectors.move_to_end(key)
        return found

    def read(self, value: Any) -> np.ndarray[Any, Any]:
        """An array that a field holds or refers to.

        Raises:
            OSError: `value` refers to a vector whose file is not there.
        """
        if isinstance(value, ArrayRef):
            raw = used_file(lambda: vector_path(self.folder, value), Path.read_bytes)
            return array_from_raw(value.dtype, value.shape, raw)
        return np.asarray(value)


def source_key(value: Any) -> bytes:
    """Names the array that a field holds or refers to: equal for equal arrays that came in one way."""
    if isinstance(value, ArrayRef):
        return value.blob.encode()
    array = np.ascontiguousarray(value)
    return digest_bytes(repr((array.dtype.name, array.shape)).encode() + array.tobytes())
