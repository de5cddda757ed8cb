"""References to large arrays, which travel apart from the value that they stand in.

A reference is an array to everything that does not need its bytes. A reference has the array's kind, length and digest,
so that what is folded with references is verified without loading them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "ARRAY",
    "COMPLEX",
    "DTYPE",
    "DTYPES",
    "FROZENSET",
    "INT",
    "REF",
    "SET",
    "TUPLE",
    "ArrayRef",
    "current_loader",
    "itemsize",
    "loading_by",
    "ref_fields",
    "wired_ref",
]

#: Names of the dtypes an array can have on the wire: NumPy's own, then those of `ml_dtypes`.
DTYPES: Final = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    }
)

ARRAY, TUPLE, INT, COMPLEX, REF, SET, FROZENSET, DTYPE = 1, 2, 3, 4, 5, 6, 7, 8


class ArrayRef:
    """An array that did not travel with the value it stands in, and can be fetched: `await ref.load()`.

    Two references are equal if their arrays are: in dtype, shape and every bit.

    Attributes:
        dtype: the array's dtype, by its name in `DTYPES`.
        shape: its shape.
        digest: its digest, as of the array itself.
        blob: name of the blob that holds its bytes, among those of its trace.
        name: the saved name or the variable that it was sent for, for messages.
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
        """Bytes of the array's elements: what loading it brings."""
        return math.prod(self.shape) * itemsize(self.dtype)

    async def load(self) -> np.ndarray[Any, Any]:
        """Fetch the array, read-only and checked against `digest`. Each call fetches it anew: keep what it returns.

        Raises whatever the client that decoded the reference says: see `tracewire.ValueMissing`.
        """
        if self._load is None:
            raise RuntimeError(f"{self!r} was decoded apart from a client, which alone knows where to load it from")
        return await self._load(self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._elsewhere())

    def __getattr__(self, name: str) -> NoReturn:
        what = f" has no {name!r}" if name.startswith("_") else f": {self._elsewhere()}"
        raise AttributeError(f"{type(self).__name__}{what}")

    def _elsewhere(self) -> str:
        where = f" saved as {self.name!r}" if self.name else ""
        return (
            f"this array of {self.nbytes} bytes{where} is a reference, whose values are still to be loaded: "
            "await its load(), or tracewire.load(value) for all in a value"
        )

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, ArrayRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<ArrayRef {self.dtype}{list(self.shape)}, {self.nbytes} bytes, digest {self.digest.hex()[:12]}>"


Loader: TypeAlias = "Callable[[ArrayRef], Awaitable[np.ndarray[Any, Any]]]"

current_loader: ContextVar[Loader | None] = ContextVar("tracewire_loader", default=None)


@contextmanager
def loading_by(loader: Loader | None) -> Iterator[None]:
    """References decoded in this context load themselves by `loader`."""
    token = current_loader.set(loader)
    try:
        yield
    finally:
        current_loader.reset(token)


_ITEMSIZES: Final = {"bool": 1, "complex64": 8, "complex128": 16, "bfloat16": 2}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    known = _ITEMSIZES.get(dtype)
    if known is None:
        known = 1 if dtype.startswith("float8") else int(dtype.lstrip("uintfloa")) // 8
    return known


ref_fields = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes, str, str])


def wired_ref(ref: ArrayRef) -> Any:
    fields = (ref.dtype, ref.shape, ref.digest, ref.blob, ref.name)
    return msgspec.msgpack.Ext(REF, msgspec.msgpack.encode(fields))
