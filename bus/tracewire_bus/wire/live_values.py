"""Live parameters: which values they can have, and whether a change fits the declaration.

A trace declares its live parameters by their first values: finite numbers, booleans, strings, bytes and arrays of
finite numbers, by name. The first value fixes a parameter's *form* (its type; for an array also dtype and shape), and
every later value must have the same form. A client checks a change before sending it, and sends the form beside each
value: the script in Redis that accepts a change compares forms without decoding values (`lua/record_steer.lua`).
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

__all__ = ["MAX_BYTES", "MAX_NAMES", "LiveError", "LiveValue", "cast_to", "live_values", "pack_live", "unpack_live"]

#: Limit on the number of a trace's live parameters.
MAX_NAMES: Final = 64
#: Limit on the packed size of the value of one live parameter.
MAX_BYTES: Final = 1024 * 1024


class LiveError(ValueError):
    """A value that a live parameter cannot have.

    Attributes:
        name: the parameter; `""` if the error is of all of them, or of a name.
        message: the reason.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


class LiveValue(msgspec.Struct, frozen=True):
    """The value of a live parameter.

    Attributes:
        value: the value; an array as `array_of` returns it.
        form: the value's type in words, such as `a number` or `an array of float32 [8]`.
        packed: the packed value.
    """

    value: Any
    form: str
    packed: bytes


def live_values(values: Mapping[Any, Any]) -> dict[str, LiveValue]:
    """Check and pack the values of a trace's live parameters, given by name.

    Raises:
        LiveError: there are too many, or a name or a value is not allowed; the error is of the first such.
    """
    if len(values) > MAX_NAMES:
        raise LiveError("", f"a trace has at most {MAX_NAMES} live parameters, got {len(values)}")
    return {name: _prepare(name, value) for name, value in values.items()}


def _prepare(name: Any, value: Any) -> LiveValue:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
        raise LiveError(
            "", f"expected names that a block can read as live.NAME, without a leading '_', got {str(name)[:80]!r}"
        )
    if isinstance(value, ArrayRef):
        raise LiveError(name, f"got {value!r}, a reference to an array of another trace; pass what its load() returns")
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
            f"the value takes {len(packed)} bytes; the limit is {MAX_BYTES}, since a live parameter can change at any "
            "step; pass a value that stays the same as a variable of the block, which has no such limit",
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
    """Convert an array to the form `form` if the two differ only in a floating-point dtype.

    Returns `None` for other values and forms, and if an element overflows the other dtype.
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
        return _prepare("value", array)
    except LiveError:
        return None


def pack_live(values: Mapping[str, bytes]) -> bytes:
    """The packed dict of packed values by name, as in `Submission.live` and `Change.values`."""
    return msgspec.msgpack.encode({name: msgspec.Raw(packed) for name, packed in values.items()})


def unpack_live(packed: bytes) -> dict[str, LiveValue]:
    """Decode and check live parameters from a packed dict, such as `Submission.live`.

    Raises:
        LiveError: `packed` is not of a dict, or of a dict that `live_values` refuses.
        ValueError: `packed` is not a packed value.
    """
    values = unpack(packed)
    if not isinstance(values, dict):
        raise LiveError("", f"expected live parameters by name, got {type(values).__qualname__}")
    return live_values(values)
