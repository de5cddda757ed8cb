"""Live parameters: what may be one, and whether a change fits what was declared.

A trace declares its live parameters by their first values: numbers, booleans, strings, bytes and arrays, by name. Each
has a *form* from then on (what kind of value it is; for an array its dtype and shape), which a change must have too.
Numbers are finite, in arrays as well. A client checks before it sends; what it sends beside each value is its form,
so that Redis can compare (`trace_records.py`) without knowing what a value is.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .arrays import array_of
from .kinds import Unsavable, is_array
from .packing import pack, unpack
from .refs import ArrayRef

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MAX_BYTES", "MAX_NAMES", "LiveError", "LiveValue", "cast_to", "joined", "live_values", "parted"]

#: How many live parameters a trace may have, and how large the value of each may be, packed.
MAX_NAMES: Final = 64
MAX_BYTES: Final = 1024 * 1024


class LiveError(ValueError):
    """A value that no live parameter can have. `name` is the parameter's, `""` where all of them are at fault."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class LiveValue(msgspec.Struct, frozen=True):
    """A live parameter's value, its form, and the value packed."""

    value: Any
    form: str
    packed: bytes


def live_values(values: Mapping[Any, Any]) -> dict[str, LiveValue]:
    """What a caller gave as live parameters, checked and prepared.

    Raises:
        LiveError: for the first that cannot be one.
    """
    if len(values) > MAX_NAMES:
        raise LiveError("", f"at most {MAX_NAMES} live parameters to a trace, got {len(values)}")
    return {name: _prepared(name, value) for name, value in values.items()}


def _prepared(name: Any, value: Any) -> LiveValue:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
        raise LiveError(
            "", f"expected names that a block can read as live.NAME, without a leading '_', got {str(name)[:80]!r}"
        )
    if isinstance(value, ArrayRef):
        raise LiveError(name, f"it is {value!r} of another trace: pass what its load() returns")
    if is_array(value) and not value.shape:
        value = value.item()
    try:
        if is_array(value):
            array = array_of(value)
            form = f"an array of {array.dtype.name} {list(array.shape)}"
            _check_finite(name, array)
            value = array
        else:
            form = _form(name, value)
        packed = pack(value)
    except Unsavable as error:
        raise LiveError(name, str(error)) from None
    if len(packed) > MAX_BYTES:
        raise LiveError(
            name,
            f"it takes {len(packed)} bytes, and may take {MAX_BYTES}, since it can change at any step; "
            "what stays the same can be a variable of the block, of any size",
        )
    return LiveValue(value, form, packed)


def _form(name: str, value: Any) -> str:
    match value:
        case bool():
            return "a boolean"
        case int() | float():
            if isinstance(value, float) and not math.isfinite(value):
                raise LiveError(name, f"expected a finite number, got {value}")
            return "a number"
        case str():
            return "a string"
        case bytes():
            return "bytes"
        case _:
            raise LiveError(
                name, f"expected a number, a boolean, a string, bytes or an array, got {type(value).__qualname__}"
            )


def _check_finite(name: str, array: np.ndarray[Any, Any]) -> None:
    import numpy as np

    if array.dtype.kind in "biu":
        return
    try:
        finite = bool(np.isfinite(array if array.dtype.kind in "fc" else array.astype(np.float32)).all())
    except (TypeError, ValueError):
        raise LiveError(name, f"expected an array of numbers, got dtype {array.dtype}") from None
    if not finite:
        raise LiveError(name, "expected finite numbers, got NaN or an infinity in the array")


def cast_to(value: LiveValue, form: str) -> LiveValue | None:
    """An array as one of the form `form`, if only its dtype differs and both hold floating-point numbers.

    Raises nothing: `None` if it cannot be.
    """
    if not is_array(value.value):
        return None
    import numpy as np

    from .arrays import array_from_raw

    for wanted in ("float16", "bfloat16", "float32", "float64"):
        if form == f"an array of {wanted} {list(value.value.shape)}":
            break
    else:
        return None
    if value.value.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        return None
    with np.errstate(over="ignore"):
        array = value.value.astype(array_from_raw(wanted, (0,), b"").dtype)
    try:
        return _prepared("value", array)
    except LiveError:
        return None


def joined(values: Mapping[str, bytes]) -> bytes:
    """Packed values by name as a packed dict, as it stands in a `Submission` and in a `Change`."""
    return msgspec.msgpack.encode({name: msgspec.Raw(packed) for name, packed in values.items()})


def parted(packed: bytes) -> dict[str, LiveValue]:
    """The live parameters of a submission, prepared.

    Raises:
        LiveError: they are none.
        ValueError: it is no packed value.
    """
    values = unpack(packed)
    if not isinstance(values, dict):
        raise LiveError("", f"expected live parameters by name, got {type(values).__qualname__}")
    return live_values(values)
