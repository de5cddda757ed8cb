"""Arrays of one step, brought to host memory together.

What is encoded must be in host memory, as bytes. One copy a tensor would make a GPU's step wait many times, and on
any device several calls a tensor cost more than its bytes do. A `HostCopy` therefore joins all tensors of one dtype
that it is told of in advance, copies them at once, and hands out slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from tracewire_bus.values import DTYPES, MAX_DEPTH, Unsavable, array_payload

__all__ = ["TORCH_DTYPES", "HostCopy"]

#: The names of torch's dtypes that can travel.
TORCH_DTYPES: dict[torch.dtype, str] = {
    dtype: name for name in sorted(DTYPES) if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def _plain(tensor: Any) -> bool:
    """Whether a tensor's elements can be joined with others': dense, with data, and nothing left to be carried out."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in TORCH_DTYPES
        and not tensor.requires_grad
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


class HostCopy:
    """Saved values in host memory: payloads of the tensors it was primed with, and anything else on demand.

    It knows tensors by identity, so it is good for as long as they are held, and for one moment of their contents.
    Tensors of more than `threshold` bytes (0: none) are not its business: see `large.py`.
    """

    def __init__(self, threshold: int = 0) -> None:
        self._most = threshold or math.inf
        self._payloads: dict[int, bytes] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def prime(self, tensors: Iterable[Any]) -> None:
        """Copy tensors to the host, all of one dtype and device in one go. Others are left for later."""
        groups: dict[tuple[torch.dtype, torch.device], dict[int, tuple[torch.Tensor, int]]] = {}
        for tensor in tensors:
            if _plain(tensor) and (size := tensor.nbytes) <= self._most:
                groups.setdefault((tensor.dtype, tensor.device), {})[id(tensor)] = tensor, size
        for (dtype, _), group in groups.items():
            flat = [tensor.reshape(-1) for tensor, _ in group.values()]
            joined = (torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()).cpu()
            raw = memoryview(joined.view(torch.uint8).numpy())
            start = 0
            for key, (tensor, size) in group.items():
                stop = start + size
                self._payloads[key] = array_payload(TORCH_DTYPES[dtype], tuple(tensor.shape), raw[start:stop])
                start = stop

    def payload(self, tensor: torch.Tensor) -> bytes | None:
        """The payload of a tensor that the copy was primed with."""
        return self._payloads.get(id(tensor))

    def __call__(self, value: Any) -> Any:
        """`value` with every tensor in it in host memory."""
        return self._local(value, 0) if torch.cuda.is_available() else value

    def _local(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu" or value.is_meta:
                return value
            copy = self._copies.get(id(value))
            if copy is None:
                copy = self._copies[id(value)] = value.detach().cpu()
            return copy
        if depth > MAX_DEPTH:
            raise Unsavable((), f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        if type(value) is list:
            return [self._local(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self._local(item, depth + 1) for item in value)
        if type(value) is dict:
            return {key: self._local(item, depth + 1) for key, item in value.items()}
        return value
