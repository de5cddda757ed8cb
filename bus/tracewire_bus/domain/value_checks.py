"""Checks of the numbers and arrays of declared interventions, which name the field at fault."""

from __future__ import annotations

from typing import Any, Final

from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.refs import ArrayRef, is_vector

__all__ = ["MAX_INDEX", "DeclarationError", "check_array", "check_content", "check_number"]

#: The greatest index of a token: engines count tokens in 32 bits.
MAX_INDEX: Final = 2**31 - 1


class DeclarationError(ValueError):
    """A declared intervention is invalid, or does not fit the model.

    Attributes:
        field: the part at fault, such as `interventions[0].at`.
        message: the reason.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def check_number(value: Any, field: str) -> None:
    if isinstance(value, float) and value != value:
        raise DeclarationError(field, "expected a number, got NaN")
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        raise DeclarationError(field, "expected a finite number, got an infinity")


def check_array(
    value: Any, field: str, dimensions: tuple[int, ...], width: int | None, *, what: str = "the model's hidden size is"
) -> tuple[int, ...]:
    """Check the type, the shape and the elements of an array, and return the shape.

    Args:
        value: an array, or a reference to a vector.
        field: names the array in errors.
        dimensions: how many dimensions it may have.
        width: its last dimension; `None` for any.
        what: begins the error about another last dimension.

    Raises:
        DeclarationError: it does not fit.
    """
    if isinstance(value, ArrayRef):
        if not is_vector(value):
            raise DeclarationError(field, f"expected an array, got {value!r}, which belongs to a trace; load it first")
    elif not is_array(value):
        raise DeclarationError(field, f"expected an array, got {type(value).__qualname__}")
    shape = tuple(value.shape)
    shapes = {1: "[hidden]", 2: "[heads, head_size]" if 3 in dimensions else "[n, hidden]"}
    shapes[3] = "[positions, heads, head_size]"
    wanted = " or ".join(shapes[count] for count in dimensions)
    if len(shape) not in dimensions or 0 in shape:
        raise DeclarationError(field, f"expected an array of shape {wanted}, got {list(shape)}")
    if width is not None and shape[-1] != width:
        raise DeclarationError(field, f"{what} {width}, got an array of shape {list(shape)}")
    if not isinstance(value, ArrayRef):
        check_content(value, field)
    return shape


def check_content(value: Any, field: str) -> None:
    """Check the elements of an array. `check_array` does so too, but for an array that it has only a reference to.

    Raises:
        DeclarationError: the array has something else than finite numbers.
    """
    import numpy as np

    array = np.asarray(array_of(value))
    try:
        finite = bool(np.isfinite(array.astype(np.float32)).all())
    except (TypeError, ValueError):
        raise DeclarationError(field, f"expected an array of numbers, got dtype {array.dtype}") from None
    if not finite:
        raise DeclarationError(field, "expected finite numbers, got NaN or an infinity in it")
