"""Arrays of a trace as files: found by digest, encoded as npy, safetensors, Arrow or raw elements."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any, Final

import numpy as np

from tracewire import ArrayRef, LibraryMissing, State, digest
from tracewire.traces.large import as_dtype
from tracewire_bus.wire.arrays import array_of, raw_bytes
from tracewire_bus.wire.refs import DTYPES

from .arrow import arrow_stream
from .json_values import arrays_in
from .problems import Problem

__all__ = ["FORMATS", "Download"]

#: The media type of each format.
FORMATS: Final = {
    "npy": "application/x-npy",
    "safetensors": "application/vnd.safetensors",
    "arrow": "application/vnd.apache.arrow.stream",
    "raw": "application/octet-stream",
}
#: Floats that NumPy itself does not have.
_EXTRA = ("bfloat16", "float8")


class Download:
    """One array of a trace, or a reference to one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @classmethod
    def all_of(cls, state: State) -> dict[bytes, Download]:
        """The arrays of a trace by digest."""
        everything = [choice.saves for one in state.invokes for choice in one.choices]
        arrays = [array for saves in (*everything, state.shared) for array in arrays_in(saves)]
        return {array.digest if isinstance(array, ArrayRef) else digest(array): cls(array) for array in arrays}

    @property
    def held(self) -> int:
        """The bytes of an array that is here, and not behind a reference."""
        return 0 if isinstance(self._value, ArrayRef) else int(array_of(self._value).nbytes)

    @property
    def dtype(self) -> str:
        """The dtype that the array was saved with."""
        return self._value.dtype if isinstance(self._value, ArrayRef) else str(self._value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self._value.shape)

    async def encoded(self, format: str, dtype: str | None = None) -> bytes:
        """The array as a file.

        Raises:
            Problem: the dtype is none.
            ValueMissing: a large array has expired.
            LibraryMissing: safetensors, or pyarrow, is not installed.
        """
        if dtype is not None and dtype not in DTYPES:
            known = ", ".join(sorted(DTYPES))
            raise Problem(422, f"expected one of {known}", code="invalid_request", field="dtype")
        array = array_of(await self._value.load() if isinstance(self._value, ArrayRef) else self._value)
        if dtype is not None:
            array = as_dtype(dtype)(array)
        elif format == "npy" and array.dtype.name.startswith(_EXTRA):
            array = array.astype(np.float32)
        if format == "npy":
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            return file.getvalue()
        if format == "arrow":
            return arrow_stream(array)
        return bytes(raw_bytes(array)) if format == "raw" else _safetensors(array)


def _safetensors(array: np.ndarray[Any, Any]) -> bytes:
    try:
        # By name: only this format needs it.
        save = import_module("safetensors.numpy").save
    except ImportError as error:
        raise LibraryMissing("the format safetensors", "safetensors", "gateway") from error
    try:
        return bytes(save({"value": array}))
    except (KeyError, ValueError, TypeError) as error:
        raise Problem(422, f"safetensors has no {array.dtype.name}", code="no_such_form", field="format") from error
