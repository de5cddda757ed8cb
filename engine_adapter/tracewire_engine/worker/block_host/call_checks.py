"""Checks the tensors with which a block in a host calls a module of the model.

Kernels of the engine take tensors to be as wide as their weights, and of the same kind of number. Behind others they
read and write what lies there in the worker's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["check_inputs", "checked_widths"]


def check_inputs(module: torch.nn.Module, tensors: Sequence[torch.Tensor], most_rows: int) -> None:
    """Check the tensors with which a block calls a module: kernels of the engine read what lies behind short ones.

    A row is a vector along the last axis, and an index of a tensor of integers. Linear modules check the rest
    themselves, wherever they are called (`checked_widths`).

    Raises:
        ValueError: they have too many rows or different numbers of rows; an index is of no row of an embedding, or of
            another module's weights and buffers; an embedding gets other numbers than indices; or rows for a norm have
            another width or kind of number than its weight.
    """
    rows = [one.numel() if _counts(one) else math.prod(one.shape[:-1]) for one in tensors]
    if sum(rows) > most_rows:
        raise ValueError(
            f"a call of a module takes tensors of {most_rows} rows together, and these have {sum(rows)}: every request "
            "waits for it; call it for fewer rows at once"
        )
    if len(set(rows)) > 1:
        raise ValueError(f"the tensors of a call have {' and '.join(map(str, rows))} rows; give them as many each")
    counts = [one for one in tensors if _counts(one)]
    if hasattr(module, "num_embeddings"):
        if len(counts) < len(tensors):
            raise ValueError(f"{type(module).__name__} takes indices: tensors of integers")
        # A rank that holds a part of the table takes the indices of the whole one. Some add an offset to them.
        offset = getattr(module, "offset", 0)
        _check_indices(counts, module.num_embeddings - (offset if type(offset) is int else 0))
        return
    if _is_linear(module):
        return
    weights = list(module.parameters())
    _check_indices(counts, min((one.shape[0] for one in (*weights, *module.buffers()) if one.ndim), default=0))
    widths = {(one.shape[-1], one.dtype) for one in weights if one.ndim == 1}
    if len(widths) == 1 and all(one.ndim == 1 and one.numel() for one in weights):
        ((width, dtype),) = widths
        for tensor in tensors:
            if not _counts(tensor) and (tuple(tensor.shape[-1:]), tensor.dtype) != ((width,), dtype):
                raise _misfit(module, width, dtype, tensor)


@contextmanager
def checked_widths(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have vLLM's linear modules among these check what they multiply, until the end of the context.

    On a CPU they keep packed weights alone. The kernels for these check neither the width nor the kind of number.
    """
    methods = {id(one.quant_method): one.quant_method for one in modules if _is_linear(one)}
    for method in methods.values():
        method.apply = _checked(method.apply)
    try:
        yield
    finally:
        for method in methods.values():
            del method.apply


def _is_linear(module: Any) -> bool:
    """Whether vLLM multiplies rows by its weight. An embedding's may be the head's, too."""
    return hasattr(module, "input_size") and callable(getattr(getattr(module, "quant_method", None), "apply", None))


def _checked(apply: Callable[..., Any]) -> Callable[..., Any]:
    def checked(module: Any, rows: torch.Tensor, *rest: Any, **named: Any) -> Any:
        width = getattr(module, "input_size_per_partition", module.input_size)
        dtype = _dtype(module) or rows.dtype
        if tuple(rows.shape[-1:]) != (width,) or rows.dtype != dtype:
            raise _misfit(module, width, dtype, rows)
        return apply(module, rows, *rest, **named)

    return checked


def _dtype(module: Any) -> torch.dtype | None:
    """The kind of number that a linear module multiplies: its weight's, or the model's where that one has codes."""
    found = getattr(getattr(module, "weight", None), "dtype", None)
    if found is not None and found.is_floating_point and found.itemsize > 1:
        return found
    return getattr(module, "params_dtype", None)


def _misfit(module: torch.nn.Module, width: int, dtype: torch.dtype, rows: torch.Tensor) -> ValueError:
    return ValueError(
        f"{type(module).__name__} takes rows of {width} numbers of {dtype}, and these are of {tuple(rows.shape[-1:])} "
        f"of {rows.dtype}"
    )


def _check_indices(tensors: Iterable[torch.Tensor], most: int) -> None:
    for tensor in tensors:
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < most:
            raise ValueError(f"indices from {int(tensor.min())} to {int(tensor.max())} of a table of {most} rows")


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor has integers, which a module takes as indices."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
