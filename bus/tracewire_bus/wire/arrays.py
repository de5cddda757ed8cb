"""Arrays of NumPy and torch as they travel: a header of dtype and shape, then the little-endian elements."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import numpy as np
from .kinds import Path, Unsavable, is_array, refuse_type
from .refs import ARRAY, DTYPES, ArrayRef

__all__ = [
    "EXT_STARTS",
    "array_at",
    "array_from",
    "array_from_raw",
    "array_head",
    "array_of",
    "array_payload",
    "dtype_names",
    "encoded_array",
    "extra_dtypes",
    "packed_array",
    "payload_head",
    "raw_bytes",
]

_header_length = struct.Struct("<H")


def array_of(value: Any) -> np.ndarray[Any, Any]:
    """`value`, an array of any sort, as a C-contiguous little-endian NumPy array of a dtype in `DTYPES`.

    Shares memory with `value` where it can; a tensor on a device is copied to the host. Gradients are left behind, lazy
    conjugation and negation are carried out.

    Raises:
        Unsavable: `value` is no array, only refers to one, or cannot travel (sparse, quantized, of objects, ...).
    """
    return array_at(value, ())


def array_at(value: Any, path: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(value, ArrayRef):
        raise Unsavable(path, f"{value!r} stands for an array that is elsewhere; load it first")
    if not is_array(value):
        refuse_type(value, path)
    if not isinstance(value, (np.ndarray, np.generic)):
        return _tensor(value, path)
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and not isinstance(value, np.memmap):
        raise Unsavable(
            path, f"a {type(value).__qualname__} would lose what makes it more than an array; pass np.asarray(it)"
        )
    if type(value) is np.ndarray and value.dtype in dtype_names and value.flags.c_contiguous:
        return value
    array = np.asarray(value)
    if array.dtype.name not in DTYPES or array.dtype.metadata:
        raise Unsavable(path, f"an array of dtype {array.dtype} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    # Not `ascontiguousarray`: it makes a 0-d array 1-d.
    return np.require(array, requirements="C")


def _tensor(tensor: Any, path: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    torch = sys.modules["torch"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsavable(path, f"a tensor of layout {tensor.layout} cannot travel; pass it dense")
    if tensor.is_quantized:
        raise Unsavable(path, "a quantized tensor cannot travel; pass tensor.dequantize() or its int_repr()")
    if tensor.is_meta:
        raise Unsavable(path, "a tensor on the meta device has no values")
    if dtype not in DTYPES:
        raise Unsavable(path, f"a tensor of dtype {dtype} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    try:
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if dtype not in extra_dtypes():
            array = host.numpy()
        else:
            # torch refuses to hand these to NumPy; their bits pass as an unsigned integer of the same size.
            plain = torch.uint8 if host.element_size() == 1 else torch.uint16
            array = host.view(plain).numpy().view(extra_dtypes()[dtype])
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise Unsavable(path, f"a {type(tensor).__qualname__} of dtype {dtype} could not be read: {error}") from error
    return np.require(array, requirements="C")


_EXTRA: dict[str, np.dtype[Any]] = {}


def extra_dtypes() -> dict[str, np.dtype[Any]]:
    if not _EXTRA:
        import ml_dtypes
        import numpy as np

        _EXTRA.update(
            {name: np.dtype(getattr(ml_dtypes, name)) for name in DTYPES if name.startswith(("bfloat", "float8"))}
        )
    return _EXTRA


def raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The elements of an array as `array_of` returns them, as bytes, without a copy."""
    # Not `array.data`, which refuses `ml_dtypes` and empty shapes.
    import numpy as np

    plain: Any = array.reshape(-1).view(np.uint8)
    return memoryview(plain)


def packed_array(array: np.ndarray[Any, Any]) -> bytes:
    header = msgspec.msgpack.encode((array.dtype.name, array.shape))
    return b"".join((_header_length.pack(len(header)), header, raw_bytes(array)))


_array_header = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])


@lru_cache(maxsize=4096)
def _form(header: bytes) -> tuple[int, Callable[..., np.ndarray[Any, Any]]]:
    """What an array's header says: how many bytes it takes, and what makes it of a buffer and an offset."""
    import numpy as np

    name, shape = _array_header.decode(header)
    if name not in DTYPES:
        raise ValueError(f"an array of unknown dtype {name!r}")
    if len(shape) > 32 or any(size < 0 for size in shape):
        raise ValueError(f"an array of impossible shape {shape}")
    dtype = extra_dtypes().get(name) or np.dtype(name).newbyteorder("<")
    make: Any = np.ndarray
    return math.prod(shape) * dtype.itemsize, partial(make, shape, dtype)


def array_from(payload: memoryview) -> np.ndarray[Any, Any]:
    if len(payload) < 2:
        raise ValueError("an array's payload is cut short")
    start = 2 + _header_length.unpack_from(payload)[0]
    header = payload[2:start].tobytes()
    size, make = _form(header)
    if len(payload) - start != size:
        name, shape = _array_header.decode(header)
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(payload) - start}")
    array = make(payload, start) if size else make()
    array.flags.writeable = False
    return array


def array_from_raw(name: str, shape: tuple[int, ...], raw: memoryview | bytes | bytearray) -> np.ndarray[Any, Any]:
    """The read-only array of these little-endian elements. Shares memory with `raw`.

    Raises:
        ValueError: there is no such array, or `raw` has another length than it.
    """
    size, make = _form(msgspec.msgpack.encode((name, shape)))
    if len(raw) != size:
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(raw)}")
    array = make(raw) if size else make()
    array.flags.writeable = False
    return array


#: Names of dtypes: NumPy makes one up each time it is asked.
dtype_names: dict[Any, str] = {}


def array_payload(dtype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> bytes:
    """The payload of an array from its raw little-endian elements: what `encoded_array` takes."""
    return b"".join((payload_head(dtype, shape), raw))


@lru_cache(maxsize=4096)
def payload_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = msgspec.msgpack.encode((dtype, shape))
    return _header_length.pack(len(header)) + header


def encoded_array(payload: bytes) -> Any:
    """An array as `wire` would have it, from its payload."""
    return msgspec.msgpack.Ext(ARRAY, payload)


#: By the first byte of an extension on the wire: where its payload begins, behind the byte that says its type.
EXT_STARTS: Final = {0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2, 0xD8: 2}


@lru_cache(maxsize=4096)
def array_head(dtype: str, shape: tuple[int, ...], size: int) -> tuple[bytes, bytes]:
    """For an array of `size` bytes: what its raw elements follow on the wire, and what `array_digest` takes."""
    head = payload_head(dtype, shape)
    length = len(head) + size
    if length < 1 << 8:
        start = struct.pack(">BBb", 0xC7, length, ARRAY)
    elif length < 1 << 16:
        start = struct.pack(">BHb", 0xC8, length, ARRAY)
    else:
        start = struct.pack(">BIb", 0xC9, length, ARRAY)
    return start + head, head[2:]
