"""Arrays of one step, brought to host memory together.

What is encoded must be in host memory, as bytes. One copy a tensor would make a GPU's step wait many times, and on
any device several calls a tensor cost more than its bytes do. A `HostCopy` therefore joins all tensors of one dtype
that it is told of in advance, copies them at once, and hands out slices.

On a GPU the copy of a step is not waited for: it is under way while the next step is prepared, and what is made of its
bytes, a `Late` array, is made one step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from tracewire_bus.values import (
    DTYPES,
    MAX_DEPTH,
    Unsavable,
    array_payload,
    encoded_array,
    payload_digest,
)

__all__ = ["TORCH_DTYPES", "HostCopy", "Late", "ToHost", "encoded_late"]

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


class ToHost:
    """A copy of a tensor of bytes to host memory, perhaps under way.

    Its memory is given back by `release`, for a later copy of the same size: making it anew costs more than copying.
    """

    _free: ClassVar[dict[int, list[tuple[torch.Tensor, torch.cuda.Event]]]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._lent: torch.cuda.Event | None = None
        if tensor.is_cuda:
            free = self._free.get(tensor.nbytes)
            if free:
                self._host, self._lent = free.pop()
            else:
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._lent = torch.cuda.Event()
            self._host.copy_(tensor, non_blocking=True)
            self._lent.record()
            self._copied = self._lent
        else:
            self._host = tensor

    def release(self) -> None:
        """Give the memory back. Nothing of `bytes` may be used any more."""
        if self._lent is not None:
            if len(self._free) > 64:
                self._free.clear()
            self._free.setdefault(self._host.nbytes, []).append((self._host, self._lent))
            self._lent = None

    @property
    def there(self) -> bool:
        """Whether the bytes can be read without waiting."""
        copied = self._copied
        return copied is None or copied.query()

    def bytes(self) -> memoryview:
        """The bytes; waits for them."""
        copied = self._copied
        if copied is not None:
            copied.synchronize()
            self._copied = None
        return memoryview(self._host.numpy())


class Late:
    """An array whose bytes are on their way to the host: stands in a delta until the delta is encoded."""

    __slots__ = ("_copy", "_digest", "_dtype", "_payload", "_shape", "_start", "_stop")

    def __init__(self, copy: ToHost, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> None:
        self._copy: ToHost | None = copy
        self._dtype, self._shape, self._start, self._stop = dtype, shape, start, stop
        self._payload: bytes | None = None
        self._digest = b""

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return self._stop - self._start

    def payload(self) -> bytes:
        """Its payload; waits for the copy."""
        # Two threads may ask at once. The copy is let go of after the payload is there.
        copy, payload = self._copy, self._payload
        if payload is None and copy is not None:
            raw = copy.bytes()[self._start : self._stop]
            payload = self._payload = array_payload(self._dtype, self._shape, raw)
            self._copy = None
        found = payload or self._payload
        assert found is not None
        return found

    def digest(self) -> bytes:
        """Its digest; waits for the copy."""
        if not self._digest:
            self._digest = payload_digest(self.payload())
        return self._digest


def encoded_late(value: Any) -> Any:
    """For an encoder of deltas: a `Late` array as it stands on the wire.

    Raises:
        NotImplementedError: it is something else.
    """
    if isinstance(value, Late):
        return encoded_array(value.payload())
    raise NotImplementedError(f"{type(value).__name__} cannot be encoded")


class HostCopy:
    """Saved values in host memory: payloads of the tensors it was primed with, and anything else on demand.

    It knows tensors by identity, so it is good for as long as they are held, and for one moment of their contents.
    Tensors of more than `threshold` bytes (0: none) are not its business: see `large.py`. With `late`, what is primed
    on a GPU comes as `Late` arrays, and `under_way` names the last copy.
    """

    def __init__(self, threshold: int = 0, *, late: bool = False) -> None:
        self._most = threshold or math.inf
        self._late = late
        self.under_way: ToHost | None = None
        self._payloads: dict[int, bytes | Late] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def prime(self, tensors: Iterable[Any]) -> None:
        """Copy tensors to the host, all of one dtype and device in one go. Others are left for later."""
        groups: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            if _plain(tensor) and tensor.nbytes <= self._most:
                groups.setdefault((tensor.dtype, tensor.device), {})[id(tensor)] = tensor
        for (dtype, device), group in groups.items():
            flat = [tensor.reshape(-1) for tensor in group.values()]
            joined = torch.cat(flat) if len(flat) > 1 else flat[0].contiguous()
            copy = ToHost(joined.view(torch.uint8))
            late = self._late and device.type == "cuda"
            raw = None if late else copy.bytes()
            if late:
                self.under_way = copy
            start = 0
            for key, tensor in group.items():
                stop, shape = start + tensor.nbytes, tuple(tensor.shape)
                self._payloads[key] = (
                    Late(copy, TORCH_DTYPES[dtype], shape, start, stop)
                    if raw is None
                    else array_payload(TORCH_DTYPES[dtype], shape, raw[start:stop])
                )
                start = stop

    def payload(self, tensor: torch.Tensor) -> bytes | Late | None:
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
