"""Turns the arrays of submissions into tensors on the worker's device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracewire_bus.wire.refs import ArrayRef
from tracewire_engine.protocol.input_files import InputFolder, input_path, used_file

__all__ = ["to_tensors"]


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _tensor(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A tensor with memory of its own from a decoded array, of the same dtype (bfloat16 and the float8s included)."""
    name = array.dtype.name
    dtype = _torch_dtype(name)
    flat = bytearray(array.tobytes())
    if not flat:
        return torch.empty(array.shape, dtype=dtype, device=device)
    return torch.frombuffer(flat, dtype=dtype).reshape(array.shape).to(device)


def _bytes_of(path: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _mapped(ref: ArrayRef, device: torch.device, folder: InputFolder) -> torch.Tensor:
    """A tensor over the file of a large array, mapped copy-on-write: pages are read, and copied, as they are needed."""
    dtype = _torch_dtype(ref.dtype)
    path = input_path(folder, ref)
    if isinstance(path, torch.Tensor):
        flat = path
    else:
        flat = used_file(lambda: input_path(folder, ref), lambda found: _bytes_of(found, ref.nbytes))
    return flat.view(dtype).reshape(ref.shape).to(device)


def to_tensors(value: Any, device: torch.device, folder: InputFolder = Path()) -> Any:
    """`value` with every array in it as a tensor on `device`, and every dtype as torch's.

    Containers are copied, so that a block may change them.

    Args:
        value: as `unpack` returns it.
        device: of the tensors.
        folder: where the files of large arrays lie, which references name (see `large_inputs.py`).
    """
    if isinstance(value, np.ndarray):
        return _tensor(value, device)
    if isinstance(value, ArrayRef):
        return _mapped(value, device, folder)
    if isinstance(value, np.dtype):
        return _torch_dtype(value.name)
    if isinstance(value, list):
        return [to_tensors(item, device, folder) for item in value]
    if isinstance(value, tuple):
        return tuple(to_tensors(item, device, folder) for item in value)
    if isinstance(value, dict):
        return {key: to_tensors(item, device, folder) for key, item in value.items()}
    return value
