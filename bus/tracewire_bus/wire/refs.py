"""References to large arrays, which are sent apart from the value that contains them.

A reference has the kind, length and digest of its array, so that a fold with references can be verified without loading
the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ARRAY",
    "BULK",
    "COMPLEX",
    "DTYPE",
    "DTYPES",
    "FROZENSET",
    "INT",
    "REF",
    "SET",
    "TUPLE",
    "VECTOR",
    "ArrayRef",
    "current_loader",
    "encode_ref",
    "is_vector",
    "itemsize",
    "loading_by",
    "ref_decoder",
]

#: Names of the dtypes of arrays that can travel: those of NumPy, then those of `ml_dtypes`.
DTYPES: Final = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    }
)

#: Types of msgpack extensions. They are part of the wire format.
ARRAY, TUPLE, INT, COMPLEX, REF, SET, FROZENSET, DTYPE, BULK = 1, 2, 3, 4, 5, 6, 7, 8, 9

#: Begins the name of a vector: an array of declared interventions that traces share (`store/vectors.py`). The digest in
#: hexadecimal follows. Blobs of a trace have no such names.
VECTOR: Final = "vector-"


class ArrayRef:
    """A reference to a large array that was not sent with its value: `await ref.load()` downloads the array.

    Two references are equal if their arrays are equal in dtype, shape and every bit.

    Attributes:
        dtype: the array's dtype, one of `DTYPES`.
        shape: the array's shape.
        digest: the array's digest, 16 bytes.
        blob: the name of the blob with the array's elements, among the blobs of the trace; or that of a vector.
        name: the name of the save or the variable that contains the array, for error messages.
    """

    __slots__ = ("_load", "blob", "digest", "dtype", "name", "shape")

    def __init__(
        self, dtype: str, shape: tuple[int, ...], digest: bytes, blob: str, name: str = "", load: Loader | None = None
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"a reference to an array of unknown dtype {dtype!r}")
        if len(shape) > 32 or any(size < 0 for size in shape) or len(digest) != 16:
            raise ValueError(f"a reference to an array of impossible shape {shape} or digest {digest.hex()!r}")
        self.dtype = dtype
        self.shape = tuple(shape)
        self.digest = digest
        self.blob = blob
        self.name = name
        self._load = load

    @property
    def nbytes(self) -> int:
        """The size of the array's elements in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)

    async def load(self) -> np.ndarray[Any, Any]:
        """Download the array and check it against `digest`. The array is read-only.

        Each call downloads the array again: keep the result.

        Raises:
            RuntimeError: the reference was not decoded by a client.
            Exception: the errors of the client's loader, such as `tracewire.ValueMissing`.
        """
        if self._load is None:
            raise RuntimeError(f"{self!r} was not decoded by a client; only a client can load arrays")
        return await self._load(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._not_loaded())

    def __getattr__(self, name: str) -> NoReturn:
        reason = f" has no {name!r}" if name.startswith("_") else f": {self._not_loaded()}"
        raise AttributeError(f"{type(self).__name__}{reason}")

    def _not_loaded(self) -> str:
        where = f" saved as {self.name!r}" if self.name else ""
        return (
            f"this array of {self.nbytes} bytes{where} is a reference and not loaded yet: "
            "await its load(), or tracewire.load(value) for all references in a value"
        )

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, ArrayRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<ArrayRef {self.dtype}{list(self.shape)}, {self.nbytes} bytes, digest {self.digest.hex()[:12]}>"


#: Downloads the array of a reference.
Loader: TypeAlias = "Callable[[ArrayRef], Awaitable[np.ndarray[Any, Any]]]"

#: The loader of references that are decoded in the current context; see `loading_by`.
current_loader: ContextVar[Loader | None] = ContextVar("tracewire_loader", default=None)


@contextmanager
def loading_by(loader: Loader | None) -> Iterator[None]:
    """Within the `with` block, decoded references get `loader` for their `load`."""
    token = current_loader.set(loader)
    try:
        yield
    finally:
        current_loader.reset(token)


_ITEMSIZES: Final = {"bool": 1, "complex64": 8, "complex128": 16, "bfloat16": 2}


@cache
def itemsize(dtype: str) -> int:
    """The size in bytes of one element of a dtype in `DTYPES`, given by name."""
    known = _ITEMSIZES.get(dtype)
    if known is None:
        known = 1 if dtype.startswith("float8") else int(dtype.lstrip("uintfloa")) // 8
    return known


ref_decoder = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes, str, str])


def encode_ref(ref: ArrayRef) -> Any:
    """A reference's msgpack extension."""
    fields = (ref.dtype, ref.shape, ref.digest, ref.blob, ref.name)
    return msgspec.msgpack.Ext(REF, msgspec.msgpack.encode(fields))


def is_vector(ref: ArrayRef) -> bool:
    """Whether a reference is to a vector, whose name has the digest of its content."""
    return ref.blob == VECTOR + ref.digest.hex()
