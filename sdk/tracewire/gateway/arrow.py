"""Arrays as streams of Arrow's IPC format.

The stream has one column, `value`, and a row for each index of the first dimension; further dimensions make a row a
fixed-shape tensor, which readers without that extension see as a list of fixed size. The schema's metadata have the
array's own `tracewire.dtype` and `tracewire.shape`. Arrow has neither bfloat16, 8-bit floats nor complex numbers: the
floats are widened to float32, which holds them exactly, and a complex number is its real and imaginary parts, as a last
dimension of 2.
"""

from __future__ import annotations

import json
from importlib import import_module
from math import prod
from typing import Any

import numpy as np

from tracewire import LibraryMissing

__all__ = ["arrow_stream"]


def arrow_stream(array: np.ndarray[Any, Any]) -> bytes:
    """An array as a whole stream.

    Raises:
        LibraryMissing: pyarrow is not installed.
    """
    try:
        # By name: only this format needs it.
        pa: Any = import_module("pyarrow")
    except ImportError as error:
        raise LibraryMissing("the format arrow", "pyarrow", "harvest") from error
    about = {"tracewire.dtype": array.dtype.name, "tracewire.shape": json.dumps(list(array.shape))}
    column = _column(pa, _plain(np.ascontiguousarray(array).reshape(array.shape or (1,))))
    schema = pa.schema([pa.field("value", column.type, nullable=False)], about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    return bytes(sink.getvalue())


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with a dtype that Arrow has."""
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], axis=-1)
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def _column(pa: Any, array: np.ndarray[Any, Any]) -> Any:
    flat = pa.array(array.reshape(-1))
    shape = array.shape[1:]
    if not shape:
        return flat
    kind = pa.fixed_shape_tensor(flat.type, shape)
    if not array.size:
        # Also where only a row's dimension is 0: the metadata have the shape.
        return pa.array([], kind)
    return pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(flat, prod(shape)))
