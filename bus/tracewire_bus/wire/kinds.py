"""What a value may be: a tree of plain Python data and arrays."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

if TYPE_CHECKING:
    pass
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

#: How deep containers may nest in a value, its path included where one is given.
MAX_DEPTH: Final = 64

Path: TypeAlias = tuple[Any, ...]

INT_MIN, INT_MAX = -(2**63), 2**64 - 1

_TRAVELS = (
    "None, bool, int, float, complex, str, bytes, dtypes, NumPy arrays, torch tensors, and lists, tuples, dicts, sets "
    "and frozensets of these"
)

_KEYS = "str, int (of 64 bits), float, bool, bytes, None and tuples of these"


class Unsavable(TypeError):
    """A value cannot travel. Says where in it (`path`, of indices and keys) and why (`reason`)."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = tuple(path)
        self.reason = reason
        super().__init__(f"at {_spell(self.path)}: {reason}" if self.path else reason)


plain_list_decoder = msgspec.msgpack.Decoder(list[Any])


def _spell(path: Path) -> str:
    """A path as one would write it: `acts[3]['mlp']`; its first step stands bare if it is a name."""
    first, *rest = (decode_key(step) for step in path)
    head = first if isinstance(first, str) and first.isidentifier() else f"[{first!r}]"
    return head + "".join(f"[{step!r}]" for step in rest)


def refuse_type(value: Any, path: Path) -> NoReturn:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise Unsavable(path, f"a value of type {name} cannot travel; what can: {_TRAVELS}")


def refuse_depth(path: Path) -> NoReturn:
    # The whole path would fill a screen and say nothing.
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
    """The kind of a value, or None if it has none. Subclasses of natives count as what they derive from."""
    known = _NATIVE_KINDS.get(type(value))
    if known is not None:
        return known
    # Before its bases are looked at: NumPy's float64 is a float too.
    if is_array(value):
        return "array"
    return "dtype" if _is_dtype(value) else _native_kind(value)


def _is_dtype(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.dtype):
        return True
    return torch is not None and hasattr(torch, "dtype") and isinstance(value, torch.dtype)


def _native_kind(value: Any) -> str | None:
    """The kind of the first native class that a value derives from: a namedtuple is a tuple, an IntEnum an int."""
    for base in type(value).__mro__:
        known = _NATIVE_KINDS.get(base)
        if known is not None:
            return known
    return None


def is_array(value: Any) -> bool:
    """Whether `value` is a NumPy array, a NumPy scalar (but for text) or a torch tensor, supported or not."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return not isinstance(value, (str, bytes))
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def kind(value: Any) -> str:
    """One of `none`, `bool`, `int`, `float`, `complex`, `str`, `bytes`, `dtype`, `array`, `list`, `tuple`, `dict`,
    `set`, `frozenset`.

    Raises:
        Unsavable: `value` is of no such kind.
    """
    return kind_or_none(value) or refuse_type(value, ())


def length(value: Any) -> int:
    """Items of a container, elements of an array, characters of a text, bytes of bytes; 1 for other scalars.

    Raises:
        Unsavable: `value` is of no kind that travels.
    """
    match kind(value):
        case "array":
            return math.prod(value.shape)
        case "list" | "tuple" | "dict" | "set" | "frozenset" | "str" | "bytes":
            return len(value)
    return 1


def path_key(key: Any, path: Path = ()) -> Any:
    """A dict's key, or an item of a set, as it is held: plain str, int, float, bool, bytes, None, or a tuple of these.

    Raises:
        Unsavable: naming `path`, the dict's own. Integers beyond 64 bits and NaN (which finds nothing) are refused too.
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
            raise Unsavable(path, f"a key that is NaN finds nothing again; keys can be {_KEYS}")
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
    """The items of a set, as they are held.

    Raises:
        Unsavable: one of them cannot be a key.
    """
    # A subclass may iterate over something else.
    if isinstance(items, set):
        items = set.__iter__(items)
    elif isinstance(items, frozenset):
        items = frozenset.__iter__(items)
    return {path_key(item, path) for item in items}


def dtype_name(value: Any, path: Path) -> str:
    # NumPy's own has no prefix, and says its byte order elsewhere.
    name = getattr(value, "name", None) or str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsavable(path, f"the dtype {value} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    return name


def plain_text(value: str, path: Path) -> str:
    plain = value if type(value) is str else str.__str__(value)
    if not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            raise Unsavable(
                path, f"a str with a lone surrogate at {error.start} is not text; pass it as bytes"
            ) from None
    return plain
