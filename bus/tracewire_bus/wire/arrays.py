"""Encodes arrays of NumPy and torch, and decodes them as read-only NumPy arrays.

An array travels as a msgpack extension. Its payload is the length of a header (2 bytes, little-endian), the header
(dtype and shape in msgpack), then the elements, little-endian and in C order.
"""

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
    "array_from_raw",
    "array_header",
    "array_of",
    "array_payload",
    "decode_array",
    "dtype_names",
    "encoded_array",
    "extra_dtypes",
    "payload_header",
    "payload_parts",
    "raw_bytes",
]

_header_length = struct.Struct("<H")


def array_of(value: Any, path: Path = ()) -> np.ndarray[Any, Any]:
    """Convert a NumPy array, NumPy scalar or torch tensor to a C-contiguous little-endian NumPy array.

    The result has the shape of `value` and a dtype in `DTYPES`. It shares memory with `value` where possible; a tensor
    on a device is copied to the host. Gradients are dropped; lazy conjugation and negation are applied.

    Args:
        value: the array to convert.
        path: where the array stands in a value, for the error to name.

    Raises:
        Unsavable: `value` is not an array, is an `ArrayRef`, or cannot travel (sparse, quantized, of objects, ...).
    """
    import numpy as np

    if isinstance(value, ArrayRef):
        raise Unsavable(path, f"{value!r} is a reference to an array that is not loaded; load it first")
    if not is_array(value):
        refuse_type(value, path)
    if not isinstance(value, (np.ndarray, np.generic)):
        return _tensor(value, path)
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and not isinstance(value, np.memmap):
        raise Unsavable(
            path, f"a {type(value).__qualname__} would arrive as a plain array; pass np.asarray(it) if that is enough"
        )
    if type(value) is np.ndarray and value.dtype in dtype_names and value.flags.c_contiguous:
        return value
    array = np.asarray(value)
    name = array.dtype.name
    if name not in DTYPES or array.dtype.metadata:
        raise Unsavable(path, f"an array of dtype {array.dtype} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    dtype_names.setdefault(array.dtype, name)
    # `ascontiguousarray` would make a 0-d array 1-d.
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
            # torch cannot convert these dtypes to NumPy; an unsigned integer of the same size carries their bits.
            plain = torch.uint8 if host.element_size() == 1 else torch.uint16
            array = host.view(plain).numpy().view(extra_dtypes()[dtype])
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise Unsavable(path, f"a {type(tensor).__qualname__} of dtype {dtype} could not be read: {error}") from error
    return np.require(array, requirements="C")


_EXTRA: dict[str, np.dtype[Any]] = {}


def extra_dtypes() -> dict[str, np.dtype[Any]]:
    """The dtypes of `ml_dtypes` that can travel, by name. Imports `ml_dtypes` on the first call."""
    if not _EXTRA:
        import ml_dtypes
        import numpy as np

        _EXTRA.update(
            {name: np.dtype(getattr(ml_dtypes, name)) for name in DTYPES if name.startswith(("bfloat", "float8"))}
        )
    return _EXTRA


def raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The elements of an array that `array_of` returned, as bytes, without a copy."""
    # `array.data` raises for `ml_dtypes` and for empty shapes.
    import numpy as np

    plain: Any = array.reshape(-1).view(np.uint8)
    return memoryview(plain)


_header_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])


@lru_cache(maxsize=4096)
def _parse_header(header: bytes) -> tuple[int, Callable[..., np.ndarray[Any, Any]]]:
    """The size in bytes of an array with this header, and a function that makes the array from a buffer and an offset.

    Raises:
        ValueError: the header is malformed.
    """
    import numpy as np

    name, shape = _header_decoder.decode(header)
    if name not in DTYPES:
        raise ValueError(f"an array of unknown dtype {name!r}")
    if len(shape) > 32 or any(size < 0 for size in shape):
        raise ValueError(f"an array of impossible shape {shape}")
    dtype = extra_dtypes().get(name) or np.dtype(name).newbyteorder("<")
    make: Any = np.ndarray
    return math.prod(shape) * dtype.itemsize, partial(make, shape, dtype)


def decode_array(payload: memoryview) -> np.ndarray[Any, Any]:
    """The read-only array that an extension's payload encodes. Shares memory with `payload`.

    Raises:
        ValueError: the payload is malformed.
    """
    if len(payload) < 2:
        raise ValueError("an array's payload is cut short")
    start = 2 + _header_length.unpack_from(payload)[0]
    header = payload[2:start].tobytes()
    size, make = _parse_header(header)
    if len(payload) - start != size:
        name, shape = _header_decoder.decode(header)
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(payload) - start}")
    array = make(payload, start) if size else make()
    array.flags.writeable = False
    return array


def payload_parts(payload: bytes) -> tuple[str, tuple[int, ...], memoryview]:
    """The dtype, the shape and the raw elements of an array, from the payload that `array_payload` made."""
    start = 2 + _header_length.unpack_from(payload)[0]
    dtype, shape = _header_decoder.decode(payload[2:start])
    return dtype, shape, memoryview(payload)[start:]


def array_from_raw(name: str, shape: tuple[int, ...], raw: memoryview | bytes | bytearray) -> np.ndarray[Any, Any]:
    """The read-only array of dtype `name` with these little-endian elements. Shares memory with `raw`.

    Raises:
        ValueError: the dtype or shape is invalid, or `raw` has a different size.
    """
    size, make = _parse_header(msgspec.msgpack.encode((name, shape)))
    if len(raw) != size:
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(raw)}")
    array = make(raw) if size else make()
    array.flags.writeable = False
    return array


#: Cache of the names of dtypes: NumPy builds the string of `dtype.name` on each access.
dtype_names: dict[Any, str] = {}


def array_payload(dtype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> bytes:
    """The payload of an array, for `encoded_array`, from its raw little-endian elements."""
    return b"".join((payload_header(dtype, shape), raw))


@lru_cache(maxsize=4096)
def payload_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = msgspec.msgpack.encode((dtype, shape))
    return _header_length.pack(len(header)) + header


def encoded_array(payload: bytes) -> Any:
    """An array's msgpack extension, as `packing.wire` returns it, from its payload."""
    return msgspec.msgpack.Ext(ARRAY, payload)


#: The offset of an extension's payload by the extension's first byte in msgpack. The type is the byte before.
EXT_STARTS: Final = {0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2, 0xD8: 2}


@lru_cache(maxsize=4096)
def array_header(dtype: str, shape: tuple[int, ...], size: int) -> tuple[bytes, bytes]:
    """The bytes before the raw elements of an array whose elements take `size` bytes.

    Returns:
        the start of the array's encoded form, up to its elements, and the header that `array_digest` takes.
    """
    head = payload_header(dtype, shape)
    length = len(head) + size
    if length < 1 << 8:
        start = struct.pack(">BBb", 0xC7, length, ARRAY)
    elif length < 1 << 16:
        start = struct.pack(">BHb", 0xC8, length, ARRAY)
    else:
        start = struct.pack(">BIb", 0xC9, length, ARRAY)
    return start + head, head[2:]
