"""The kinds of values that can travel: plain Python data, arrays, and containers of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from .refs import DTYPES, TUPLE, ArrayRef

__all__ = [
    "INT_MAX",
    "INT_MIN",
    "MAX_DEPTH",
    "Path",
    "Unsavable",
    "decode_key",
    "dtype_name",
    "is_array",
    "kind",
    "kind_or_none",
    "length",
    "path_key",
    "plain_list_decoder",
    "plain_text",
    "refuse_depth",
    "refuse_type",
    "set_members",
]

#: Limit on the nesting of containers in a value. The steps of the value's own path count, too.
MAX_DEPTH: Final = 64

#: A place in a value: indices of lists and keys of dicts, from the outside in.
Path: TypeAlias = tuple[Any, ...]

#: The range of integers that msgpack can encode.
INT_MIN, INT_MAX = -(2**63), 2**64 - 1

_TRAVELS = (
    "None, bool, int, float, complex, str, bytes, dtypes, NumPy arrays, torch tensors, and lists, tuples, dicts, sets "
    "and frozensets of these"
)

_KEYS = "str, int (of 64 bits), float, bool, bytes, None and tuples of these"


class Unsavable(TypeError):
    """A value cannot travel.

    Attributes:
        path: the place of the part that cannot travel, of indices and keys; empty for the value itself.
        reason: why the part cannot travel.
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path = tuple(path)
        self.reason = reason
        super().__init__(f"at {_format_path(self.path)}: {reason}" if self.path else reason)


#: Decodes a list, leaving extensions encoded.
plain_list_decoder = msgspec.msgpack.Decoder(list[Any])


def _format_path(path: Path) -> str:
    """A path in Python's syntax, such as `acts[3]['mlp']`. A first step that is an identifier has no brackets."""
    first, *rest = (decode_key(step) for step in path)
    head = first if isinstance(first, str) and first.isidentifier() else f"[{first!r}]"
    return head + "".join(f"[{step!r}]" for step in rest)


def refuse_type(value: Any, path: Path) -> NoReturn:
    """Raise `Unsavable` for a value at `path` of a type that cannot travel."""
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise Unsavable(path, f"a value of type {name} cannot travel; what can: {_TRAVELS}")


def refuse_depth(path: Path) -> NoReturn:
    """Raise `Unsavable` for a value at `path` that nests too deep."""
    # Only the first step: the whole path has more than `MAX_DEPTH`.
    raise Unsavable(path[:1], f"containers nest deeper than {MAX_DEPTH} or refer to themselves")


_NATIVE_KINDS: Final[dict[type, str]] = {
    type(None): "none",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
    list: "list",
    tuple: "tuple",
    dict: "dict",
    set: "set",
    frozenset: "frozenset",
    ArrayRef: "array",
}


def kind_or_none(value: Any) -> str | None:
    """The kind of a value (see `kind`), or None if its type cannot travel. A subclass has the kind of its base."""
    known = _NATIVE_KINDS.get(type(value))
    if known is not None:
        return known
    # Before `_native_kind`: NumPy's float64 derives from float.
    if is_array(value):
        return "array"
    return "dtype" if _is_dtype(value) else _native_kind(value)


def _is_dtype(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.dtype):
        return True
    return torch is not None and hasattr(torch, "dtype") and isinstance(value, torch.dtype)


def _native_kind(value: Any) -> str | None:
    """The kind of the first built-in type among a value's bases: a namedtuple is a tuple, an IntEnum an int."""
    for base in type(value).__mro__:
        known = _NATIVE_KINDS.get(base)
        if known is not None:
            return known
    return None


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array, a NumPy scalar other than text, or a torch tensor, of any dtype and layout."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return not isinstance(value, (str, bytes))
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def kind(value: Any) -> str:
    """The kind of a value.

    One of `none`, `bool`, `int`, `float`, `complex`, `str`, `bytes`, `dtype`, `array`, `list`, `tuple`, `dict`, `set`,
    `frozenset`.

    Raises:
        Unsavable: the value's type cannot travel.
    """
    return kind_or_none(value) or refuse_type(value, ())


def length(value: Any) -> int:
    """The number of a container's items, an array's elements, a text's characters or a bytes object's bytes.

    1 for other values.

    Raises:
        Unsavable: the value's type cannot travel.
    """
    match kind(value):
        case "array":
            return math.prod(value.shape)
        case "list" | "tuple" | "dict" | "set" | "frozenset" | "str" | "bytes":
            return len(value)
    return 1


def path_key(key: Any, path: Path = ()) -> Any:
    """Convert a dict's key, or a set's item, to plain str, int, float, bool, bytes, None, or a tuple of these.

    Args:
        key: the key; a subclass of one of these types becomes its base.
        path: where the dict or set stands in a value, for the error to name.

    Raises:
        Unsavable: `key` is of another type, an integer beyond 64 bits, or NaN (which no lookup would find).
    """
    match _native_kind(key):
        case "str":
            return plain_text(key, path)
        case "none" | "bool":
            return key
        case "bytes":
            return bytes(memoryview(key))
        case "int":
            plain = int.__index__(key)
            if INT_MIN <= plain <= INT_MAX:
                return plain
            raise Unsavable(path, f"an integer key must fit 64 bits, got {plain.bit_length()}; keys can be {_KEYS}")
        case "float":
            if key == key:
                return float.__float__(key)
            raise Unsavable(path, f"a key that is NaN could not be looked up; keys can be {_KEYS}")
        case "tuple":
            if len(path) >= MAX_DEPTH:
                refuse_depth(path)
            return tuple([path_key(item, (*path, index)) for index, item in enumerate(tuple.__iter__(key))])
    raise Unsavable(path, f"a key of type {type(key).__qualname__} cannot travel; keys can be {_KEYS}")


def decode_key(key: Any) -> Any:
    """A step of a delta's path as a key: decodes a tuple that was left encoded, and returns other keys as they are.

    Raises:
        ValueError: the step is an extension other than a tuple of plain data, or nests too deep.
    """
    return _decode_tuple(key, 0) if type(key) is msgspec.msgpack.Ext else key


def _decode_tuple(key: Any, depth: int) -> tuple[Any, ...]:
    if key.code != TUPLE or depth >= MAX_DEPTH:
        raise ValueError("a step of a path is neither plain data nor a tuple of it")
    items = plain_list_decoder.decode(key.data)
    return tuple([_decode_tuple(one, depth + 1) if type(one) is msgspec.msgpack.Ext else one for one in items])


def set_members(items: Iterable[Any], path: Path) -> set[Any]:
    """The items of a set, each converted by `path_key`.

    Raises:
        Unsavable: an item is of a type that `path_key` refuses.
    """
    # A subclass may override `__iter__`.
    if isinstance(items, set):
        items = set.__iter__(items)
    elif isinstance(items, frozenset):
        items = frozenset.__iter__(items)
    return {path_key(item, path) for item in items}


def dtype_name(value: Any, path: Path) -> str:
    """The name of a dtype of NumPy or torch, one of `DTYPES`.

    Raises:
        Unsavable: the dtype is not one of `DTYPES`.
    """
    # `name` of a NumPy dtype has no byte order; torch's dtypes have no `name`.
    name = getattr(value, "name", None) or str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsavable(path, f"the dtype {value} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    return name


def plain_text(value: str, path: Path) -> str:
    """Convert a string, or an instance of a subclass, to a plain `str`.

    Raises:
        Unsavable: the string has a lone surrogate, so that UTF-8 cannot encode it.
    """
    plain = value if type(value) is str else str.__str__(value)
    if not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            raise Unsavable(
                path, f"a str with a lone surrogate at {error.start} is not text; pass it as bytes"
            ) from None
    return plain
