"""Messages between pipeline stages: msgpack for what is plain, and the raw bytes of tensors behind it.

Nothing is pickled, so that a stage that receives a message from another host executes nothing of it. A value can be a
tensor, a number, a text, bytes, a dtype, a device, `None`, or a list, tuple or dict of such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch

__all__ = ["Tensors", "Unsendable", "decoded", "encoded", "gathered", "unpacked"]

#: Extensions of msgpack: what it lacks.
_TENSOR, _TUPLE, _DICT, _DTYPE, _DEVICE, _SIZE, _COMPLEX = range(1, 8)
#: How deep a value may nest.
_DEPTH: Final = 64
_LEAVES: Final = (type(None), bool, int, float, str, bytes)
_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_encoder = msgspec.msgpack.Encoder()


class Unsendable(TypeError):
    """A value that no message can have. The text names its type."""


class Tensors:
    """The tensors of a message, which are copied to host memory together."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        #: For each tensor its dtype, its shape and its first byte.
        self.table: list[tuple[str, tuple[int, ...], int]] = []
        self.size = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Add a tensor. Returns its place in the table."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.table.append((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), self.size))
        if flat.numel() % 16:
            flat = torch.nn.functional.pad(flat, (0, 16 - flat.numel() % 16))
        self.found.append(flat)
        self.size += flat.numel()
        return len(self.table) - 1

    def bytes(self) -> torch.Tensor:
        """The bytes of all tensors, as one tensor in host memory."""
        if not self.found:
            return torch.empty(0, dtype=torch.uint8)
        if any(flat.device != self.found[0].device for flat in self.found):
            return torch.cat([flat.cpu() for flat in self.found])
        return torch.cat(self.found).cpu()


def unpacked(
    table: Sequence[tuple[str, Sequence[int], int]], data: torch.Tensor, device: torch.device
) -> list[torch.Tensor]:
    """The tensors of a message, on `device`, each in memory of its own, so that none keeps the whole message."""
    flat = data.to(device)
    found = []
    for name, shape, start in table:
        dtype = _DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        found.append(flat[start : start + size].clone().view(dtype).reshape(tuple(shape)))
    return found


def encoded(value: Any, tensors: Tensors) -> bytes:
    """Encode a value. Its tensors are added to `tensors`.

    Raises:
        Unsendable: the value, or one in it, is of another type.
    """
    try:
        return _encoder.encode(_plain(value, tensors, 0))
    except OverflowError:
        raise Unsendable("an integer of more than 64 bits") from None


def _plain(value: Any, tensors: Tensors, depth: int) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if depth > _DEPTH:
        raise Unsendable(f"a value that nests deeper than {_DEPTH}")
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        return _extension(_TENSOR, tensors.add(value))
    if kind is list:
        return [_plain(item, tensors, depth + 1) for item in value]
    if kind is tuple:
        return _extension(_TUPLE, [_plain(item, tensors, depth + 1) for item in value])
    if kind is dict:
        pairs = [(_plain(key, tensors, depth + 1), _plain(item, tensors, depth + 1)) for key, item in value.items()]
        return _extension(_DICT, pairs)
    if kind is torch.dtype:
        return _extension(_DTYPE, str(value).removeprefix("torch."))
    if kind is torch.device:
        return _extension(_DEVICE, str(value))
    if kind is torch.Size:
        return _extension(_SIZE, list(value))
    if kind is complex:
        return _extension(_COMPLEX, [value.real, value.imag])
    raise Unsendable(f"a {kind.__module__}.{kind.__qualname__}")


def _extension(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode(value))


def decoded(data: bytes | memoryview, tensors: Sequence[torch.Tensor]) -> Any:
    """Decode a value that `encoded` made; `tensors` are those of its message.

    Raises:
        ValueError: it is malformed.
    """

    def extension(code: int, inner: memoryview) -> Any:
        value = decoder.decode(inner)
        if code == _TENSOR:
            return tensors[value]
        if code == _TUPLE:
            return tuple(value)
        if code == _DICT:
            return {key: item for key, item in value}  # noqa: C416  (pairs are lists)
        if code == _DTYPE:
            return _DTYPES[value]
        if code == _DEVICE:
            return torch.device(value)
        if code == _SIZE:
            return torch.Size(value)
        if code == _COMPLEX:
            return complex(*value)
        raise ValueError(f"an unknown extension {code}")

    decoder = msgspec.msgpack.Decoder(ext_hook=extension)
    try:
        return decoder.decode(data)
    except (KeyError, IndexError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"a message between stages is malformed: {error!r}") from error


def gathered(value: Any, group: Any) -> list[Any]:
    """The values of all members of a group of vLLM's (`GroupCoordinator`), in order. Every member calls it.

    Raises:
        Unsendable: this member's value cannot travel.
    """
    own = torch.frombuffer(bytearray(encoded(value, Tensors())), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.world_size)]
    torch.distributed.all_gather(sizes, torch.tensor([own.numel()], dtype=torch.int64), group=group.cpu_group)
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    torch.distributed.all_gather(parts, padded, group=group.cpu_group)
    return [decoded(part[: int(size)].numpy().tobytes(), []) for part, size in zip(parts, sizes, strict=True)]
