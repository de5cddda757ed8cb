"""Values that travel: variables of a block, live parameters, saves.

A *value* is a tree of plain Python data and arrays: None, bool, int, float, complex, str, bytes, dtypes, arrays, and
lists, tuples, dicts, sets and frozensets of these. Keys of dicts and items of sets are plain data of at most 64 bits,
and tuples of it. A value is packed in msgpack; what msgpack has no type for travels in extension types. Nothing is
pickled, so that decoding a value from a stranger runs no code of theirs.

A large array may travel as an `ArrayRef` instead: its dtype, shape and digest, and
where its bytes are (`blobs.py`). A reference is an array to everything here that does not need the bytes: it has the
array's kind, length and digest, so that what is folded with references is verified without loading them.

Arrays come from NumPy (`ml_dtypes` included) or torch, whatever their device, strides and byte order, and always
arrive as read-only NumPy arrays that share memory with the buffer they were decoded from. Whoever keeps a small array
of a large message keeps the message: copy it. The data need not be aligned in memory.

A dtype of torch arrives as the dtype of NumPy (or `ml_dtypes`) of the same name, as a tensor arrives as an array.

Two things can be asked of any value without packing it: its `digest`, by which a
consumer proves that it holds what the engine held, and whether it can travel at all, which packing answers with
`Unsavable`.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DTYPES",
    "MAX_DEPTH",
    "ArrayRef",
    "Unsavable",
    "array_digest",
    "array_from_raw",
    "array_hash",
    "array_head",
    "array_of",
    "array_payload",
    "decoder",
    "dict_digest",
    "digest",
    "encoded_array",
    "encoded_digest",
    "is_array",
    "kind",
    "length",
    "list_digest",
    "loading_by",
    "opened_key",
    "pack",
    "path_key",
    "raw_bytes",
    "unpack",
    "wire",
    "wired_key",
    "wired_tuple",
]

#: How deep containers may nest in a value, its path included where one is given.
MAX_DEPTH: Final = 64

#: Names of the dtypes an array can have on the wire: NumPy's own, then those of `ml_dtypes`.
DTYPES: Final = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"),
    }
)

Path: TypeAlias = tuple[Any, ...]

_ARRAY, _TUPLE, _INT, _COMPLEX, _REF, _SET, _FROZENSET, _DTYPE = 1, 2, 3, 4, 5, 6, 7, 8
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_TRAVELS = (
    "None, bool, int, float, complex, str, bytes, dtypes, NumPy arrays, torch tensors, and lists, tuples, dicts, sets "
    "and frozensets of these"
)
_KEYS = "str, int (of 64 bits), float, bool, bytes, None and tuples of these"

_header_length = struct.Struct("<H")
_float = struct.Struct("<d")
_complex = struct.Struct("<dd")


class Unsavable(TypeError):
    """A value cannot travel. Says where in it (`path`, of indices and keys) and why (`reason`)."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = tuple(path)
        self.reason = reason
        super().__init__(f"at {_spell(self.path)}: {reason}" if self.path else reason)


def _spell(path: Path) -> str:
    """A path as one would write it: `acts[3]['mlp']`; its first step stands bare if it is a name."""
    first, *rest = (opened_key(step) for step in path)
    head = first if isinstance(first, str) and first.isidentifier() else f"[{first!r}]"
    return head + "".join(f"[{step!r}]" for step in rest)


def _refuse(value: Any, path: Path) -> NoReturn:
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise Unsavable(path, f"a value of type {name} cannot travel; what can: {_TRAVELS}")


def _too_deep(path: Path) -> NoReturn:
    # The whole path would fill a screen and say nothing.
    raise Unsavable(path[:1], f"containers nest deeper than {MAX_DEPTH} or refer to themselves")


# --- references to large arrays ---------------------------------------------------------------------------------------


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
        return math.prod(self.shape) * _itemsize(self.dtype)

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

_loader: ContextVar[Loader | None] = ContextVar("tracewire_loader", default=None)


@contextmanager
def loading_by(loader: Loader | None) -> Iterator[None]:
    """References decoded in this context load themselves by `loader`."""
    token = _loader.set(loader)
    try:
        yield
    finally:
        _loader.reset(token)


_ITEMSIZES: Final = {"bool": 1, "complex64": 8, "complex128": 16, "bfloat16": 2}


def _itemsize(dtype: str) -> int:
    """Bytes of one element."""
    known = _ITEMSIZES.get(dtype)
    if known is None:
        known = 1 if dtype.startswith("float8") else int(dtype.lstrip("uintfloa")) // 8
    return known


_ref_fields = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], bytes, str, str])


def _wired_ref(ref: ArrayRef) -> Any:
    fields = (ref.dtype, ref.shape, ref.digest, ref.blob, ref.name)
    return msgspec.msgpack.Ext(_REF, msgspec.msgpack.encode(fields))


# --- what a value is --------------------------------------------------------------------------------------------------

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


def _kind(value: Any) -> str | None:
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
    return _kind(value) or _refuse(value, ())


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
            return _text(key, path)
        case "none" | "bool":
            return key
        case "bytes":
            return bytes(memoryview(key))
        case "int":
            plain = int.__index__(key)
            if _INT_MIN <= plain <= _INT_MAX:
                return plain
            raise Unsavable(path, f"an integer key must fit 64 bits, got {plain.bit_length()}; keys can be {_KEYS}")
        case "float":
            if key == key:
                return float.__float__(key)
            raise Unsavable(path, f"a key that is NaN finds nothing again; keys can be {_KEYS}")
        case "tuple":
            if len(path) >= MAX_DEPTH:
                _too_deep(path)
            return tuple([path_key(item, (*path, index)) for index, item in enumerate(tuple.__iter__(key))])
    raise Unsavable(path, f"a key of type {type(key).__qualname__} cannot travel; keys can be {_KEYS}")


def wired_key(key: Any) -> Any:
    """A key of `path_key` as it stands in a delta's path: a tuple would be read as a list there."""
    return wire(key) if type(key) is tuple else key


def opened_key(key: Any) -> Any:
    """The key that a step of a delta's path names, also where extensions were not decoded.

    Raises:
        ValueError: it names none.
    """
    return _ext_hook(key.code, memoryview(key.data)) if type(key) is msgspec.msgpack.Ext else key


def _members(items: Iterable[Any], path: Path) -> set[Any]:
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


def _dtype_name(value: Any, path: Path) -> str:
    # NumPy's own has no prefix, and says its byte order elsewhere.
    name = getattr(value, "name", None) or str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise Unsavable(path, f"the dtype {value} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    return name


def _text(value: str, path: Path) -> str:
    plain = value if type(value) is str else str.__str__(value)
    if not plain.isascii():
        try:
            plain.encode()
        except UnicodeEncodeError as error:
            raise Unsavable(
                path, f"a str with a lone surrogate at {error.start} is not text; pass it as bytes"
            ) from None
    return plain


# --- arrays -----------------------------------------------------------------------------------------------------------


def array_of(value: Any) -> np.ndarray[Any, Any]:
    """`value`, an array of any sort, as a C-contiguous little-endian NumPy array of a dtype in `DTYPES`.

    Shares memory with `value` where it can; a tensor on a device is copied to the host. Gradients are left behind, lazy
    conjugation and negation are carried out.

    Raises:
        Unsavable: `value` is no array, only refers to one, or cannot travel (sparse, quantized, of objects, ...).
    """
    return _array(value, ())


def _array(value: Any, path: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    if isinstance(value, ArrayRef):
        raise Unsavable(path, f"{value!r} stands for an array that is elsewhere; load it first")
    if not is_array(value):
        _refuse(value, path)
    if not isinstance(value, (np.ndarray, np.generic)):
        return _tensor(value, path)
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and not isinstance(value, np.memmap):
        raise Unsavable(
            path, f"a {type(value).__qualname__} would lose what makes it more than an array; pass np.asarray(it)"
        )
    if type(value) is np.ndarray and value.dtype in _names and value.flags.c_contiguous:
        return value
    array = np.asarray(value)
    if array.dtype.name not in DTYPES or array.dtype.metadata:
        raise Unsavable(path, f"an array of dtype {array.dtype} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    # Not `ascontiguousarray`: it makes a 0-d array 1-d.
    return np.require(array, requirements="C")


def _tensor(tensor: Any, path: Path) -> np.ndarray[Any, Any]:
    import numpy as np

    torch = sys.modules["torch"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Unsavable(path, f"a tensor of layout {tensor.layout} cannot travel; pass it dense")
    if tensor.is_quantized:
        raise Unsavable(path, "a quantized tensor cannot travel; pass tensor.dequantize() or its int_repr()")
    if tensor.is_meta:
        raise Unsavable(path, "a tensor on the meta device has no values")
    if dtype not in DTYPES:
        raise Unsavable(path, f"a tensor of dtype {dtype} cannot travel; what can: {', '.join(sorted(DTYPES))}")
    try:
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if dtype not in _extra_dtypes():
            array = host.numpy()
        else:
            # torch refuses to hand these to NumPy; their bits pass as an unsigned integer of the same size.
            plain = torch.uint8 if host.element_size() == 1 else torch.uint16
            array = host.view(plain).numpy().view(_extra_dtypes()[dtype])
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise Unsavable(path, f"a {type(tensor).__qualname__} of dtype {dtype} could not be read: {error}") from error
    return np.require(array, requirements="C")


_EXTRA: dict[str, np.dtype[Any]] = {}


def _extra_dtypes() -> dict[str, np.dtype[Any]]:
    if not _EXTRA:
        import ml_dtypes
        import numpy as np

        _EXTRA.update(
            {name: np.dtype(getattr(ml_dtypes, name)) for name in DTYPES if name.startswith(("bfloat", "float8"))}
        )
    return _EXTRA


def _raw(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of a C-contiguous array, without a copy. Not `array.data`: it refuses `ml_dtypes` and empty shapes."""
    import numpy as np

    plain: Any = array.reshape(-1).view(np.uint8)
    return memoryview(plain)


def _array_payload(array: np.ndarray[Any, Any]) -> bytes:
    header = msgspec.msgpack.encode((array.dtype.name, array.shape))
    return b"".join((_header_length.pack(len(header)), header, _raw(array)))


_array_header = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...]])


@lru_cache(maxsize=4096)
def _form(header: bytes) -> tuple[int, Callable[..., np.ndarray[Any, Any]]]:
    """What an array's header says: how many bytes it takes, and what makes it of a buffer and an offset."""
    import numpy as np

    name, shape = _array_header.decode(header)
    if name not in DTYPES:
        raise ValueError(f"an array of unknown dtype {name!r}")
    if len(shape) > 32 or any(size < 0 for size in shape):
        raise ValueError(f"an array of impossible shape {shape}")
    dtype = _extra_dtypes().get(name) or np.dtype(name).newbyteorder("<")
    make: Any = np.ndarray
    return math.prod(shape) * dtype.itemsize, partial(make, shape, dtype)


def _array_from(payload: memoryview) -> np.ndarray[Any, Any]:
    if len(payload) < 2:
        raise ValueError("an array's payload is cut short")
    start = 2 + _header_length.unpack_from(payload)[0]
    header = payload[2:start].tobytes()
    size, make = _form(header)
    if len(payload) - start != size:
        name, shape = _array_header.decode(header)
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(payload) - start}")
    array = make(payload, start) if size else make()
    array.flags.writeable = False
    return array


def array_from_raw(name: str, shape: tuple[int, ...], raw: memoryview | bytes | bytearray) -> np.ndarray[Any, Any]:
    """The read-only array of these little-endian elements. Shares memory with `raw`.

    Raises:
        ValueError: there is no such array, or `raw` has another length than it.
    """
    size, make = _form(msgspec.msgpack.encode((name, shape)))
    if len(raw) != size:
        raise ValueError(f"an array of {name} {shape} takes {size} bytes, got {len(raw)}")
    array = make(raw) if size else make()
    array.flags.writeable = False
    return array


# --- packing ----------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def pack(value: Any) -> bytes:
    """`value` in msgpack.

    Raises:
        Unsavable: naming the part of it that cannot travel.
    """
    return _encoder.encode(wire(value))


def wire(value: Any, path: Path = ()) -> Any:
    """`value` prepared to stand in a message: of natives and msgspec extensions only, sharing nothing that can change.

    `path` is where the value stands already, for errors to name and for depth to count.

    Raises:
        Unsavable: naming the part of it that cannot travel.
    """
    plain = type(value)
    if plain is float or plain is bool or value is None or plain is bytes:
        return value
    if plain is int and _INT_MIN <= value <= _INT_MAX:
        return value
    match _kind(value):
        case "array":
            if isinstance(value, ArrayRef):
                return _wired_ref(value)
            return msgspec.msgpack.Ext(_ARRAY, _array_payload(_array(value, path)))
        case "str":
            return _text(value, path)
        case "list":
            if len(path) >= MAX_DEPTH:
                _too_deep(path)
            return [wire(item, (*path, index)) for index, item in enumerate(value)]
        case "dict":
            if len(path) >= MAX_DEPTH:
                _too_deep(path)
            return {path_key(key, path): wire(item, (*path, key)) for key, item in dict.items(value)}
        case "tuple":
            if len(path) >= MAX_DEPTH:
                _too_deep(path)
            return wired_tuple([wire(item, (*path, index)) for index, item in enumerate(value)])
        case "int":
            number = int.__index__(value)
            if _INT_MIN <= number <= _INT_MAX:
                return number
            return msgspec.msgpack.Ext(_INT, _int_bytes(number))
        case "float":
            return float.__float__(value)
        case "complex":
            return msgspec.msgpack.Ext(_COMPLEX, _complex.pack(value.real, value.imag))
        case "bytes":
            return bytes(memoryview(value))
        case "set" | "frozenset" as found:
            # In an order of their own: equal sets are equal on the wire.
            items = sorted(_encoder.encode(item) for item in _members(value, path))
            packed = _encoder.encode([msgspec.Raw(item) for item in items])
            return msgspec.msgpack.Ext(_SET if found == "set" else _FROZENSET, packed)
        case "dtype":
            return msgspec.msgpack.Ext(_DTYPE, _dtype_name(value, path).encode())
    _refuse(value, path)


def wired_tuple(items: list[Any]) -> Any:
    """A tuple as `wire` would have it, from its items as `wire` has them."""
    return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))


def _int_bytes(number: int) -> bytes:
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


class _NotPlain(Exception):
    """What is decoded holds more than plain data and arrays."""


class _Decoding(threading.local):
    """How many tuples stand in each other, of what this thread decodes at the moment."""

    depth = 0


_decoding = _Decoding()
#: Without a hook an extension decodes to an object that no map takes as a key.
_without_hook = msgspec.msgpack.Decoder()


def _array_hook(code: int, payload: memoryview) -> Any:
    """Decodes arrays, which are what nearly all messages have beside plain data."""
    if code == _ARRAY:
        return _array_from(payload)
    raise _NotPlain


def _ext_hook(code: int, payload: memoryview) -> Any:
    """Decodes what msgpack has no type for."""
    if code == _ARRAY:
        return _array_from(payload)
    if code == _TUPLE:
        if _decoding.depth >= MAX_DEPTH:
            raise ValueError(f"tuples nest deeper than {MAX_DEPTH}")
        _decoding.depth += 1
        try:
            return tuple(_list_decoder(payload))
        finally:
            _decoding.depth -= 1
    if code == _INT:
        return int.from_bytes(payload, "little", signed=True)
    if code == _COMPLEX:
        if len(payload) != _complex.size:
            raise ValueError(f"a complex number takes {_complex.size} bytes, got {len(payload)}")
        return complex(*_complex.unpack(payload))
    if code in (_SET, _FROZENSET):
        return _set_from(payload) if code == _SET else frozenset(_set_from(payload))
    if code == _DTYPE:
        return _dtype_from(str(payload, "ascii"))
    if code == _REF:
        return ArrayRef(*_ref_fields.decode(payload), load=_loader.get())
    raise ValueError(f"unknown extension type {code}")


def _set_from(payload: memoryview) -> set[Any]:
    try:
        return _members((_opened(item) for item in _plain_list_decoder.decode(payload)), ())
    except Unsavable as error:
        raise ValueError(f"a set holds what it cannot: {error}") from None


def _opened(item: Any) -> Any:
    """A tuple of a set travels as an array does, since no item of a set is a list."""
    return tuple([_opened(one) for one in item]) if type(item) is list else item


def _dtype_from(name: str) -> np.dtype[Any]:
    import numpy as np

    if name not in DTYPES:
        raise ValueError(f"an unknown dtype {name[:40]!r}")
    return _extra_dtypes().get(name) or np.dtype(name)


def decoder(type_: Any = Any, *, plain: bool = False) -> Callable[[bytes | memoryview], Any]:
    """What decodes messages of this type that carry values: a function of the encoded message. With `plain`, what
    msgpack has no type for stays encoded.

    The function raises `msgspec.DecodeError` (a `ValueError`), and nothing else, where the data is no such message:
    where it is cut short, nests too deep, holds a malformed value, or has a map with an extension as a key.
    """
    decode = msgspec.msgpack.Decoder(type_, ext_hook=None if plain else _array_hook).decode
    decode_all = msgspec.msgpack.Decoder(type_, ext_hook=_ext_hook).decode

    def decoded(data: bytes | memoryview) -> Any:
        try:
            try:
                return decode(data)
            except _NotPlain:
                # Python hashes integers, complex numbers and tuples of them in a known way: a map that has them as
                # keys can be made to take time that grows with the square of its size. This refuses them as keys.
                _without_hook.decode(data)
                return decode_all(data)
        except msgspec.MsgspecError:
            raise
        except RecursionError:
            raise msgspec.DecodeError("the message nests too deep to be decoded") from None
        except (ValueError, TypeError, ArithmeticError, LookupError, MemoryError) as error:
            # From a hook, or a map whose keys cannot be hashed.
            raise msgspec.DecodeError(f"the message holds a malformed value: {error}") from error

    return decoded


_plain_list_decoder = msgspec.msgpack.Decoder(list[Any])
_decoder = decoder()
_list_decoder = decoder(list[Any])


def unpack(data: bytes | memoryview) -> Any:
    """The value that `pack` made `data` of. Its arrays share memory with `data`.

    Raises:
        msgspec.DecodeError: (a `ValueError`) `data` is no packed value.
    """
    return _decoder(data)


# --- comparing --------------------------------------------------------------------------------------------------------


def digest(value: Any) -> bytes:
    """16 bytes that two values share only if they are the same: in kind, structure, dtype, shape and every bit.

    A tensor and the array it arrives as have the same digest. `1`, `1.0` and `True` differ, as do a list and a tuple,
    `0.0` and `-0.0`, and NaNs of different bits. The order in which a dict was filled does not count, and its keys are
    told apart as Python does: `1`, `1.0` and `True` are one key.

    Raises:
        Unsavable: naming the part of it that cannot travel.
    """
    return _digest(value, ())


def _hash(tag: bytes, *parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(tag, digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()


#: Names of dtypes: NumPy makes one up each time it is asked.
_names: dict[Any, str] = {}


def _digest(value: Any, path: Path) -> bytes:
    found = _kind(value)
    if found in ("list", "tuple", "dict") and len(path) >= MAX_DEPTH:
        _too_deep(path)
    match found:
        case "none":
            return _hash(b"n")
        case "bool":
            return _hash(b"b", b"\1" if value else b"\0")
        case "int":
            return _hash(b"i", _int_bytes(int.__index__(value)))
        case "float":
            return _hash(b"f", _float.pack(value))
        case "complex":
            return _hash(b"c", _complex.pack(value.real, value.imag))
        case "str":
            return _hash(b"s", _text(value, path).encode())
        case "bytes":
            return _hash(b"y", value)
        case "array":
            if isinstance(value, ArrayRef):
                return value.digest
            array = _array(value, path)
            name = _names.get(array.dtype) or _names.setdefault(array.dtype, array.dtype.name)
            return _hash(b"a", _payload_head(name, array.shape)[2:], _raw(array))
        case "list" | "tuple":
            items = (_digest(item, (*path, index)) for index, item in enumerate(value))
            return _hash(b"l" if found == "list" else b"t", *items)
        case "dict":
            pairs = (_key_digest(path_key(key, path)) + _digest(item, (*path, key)) for key, item in dict.items(value))
            return _hash(b"d", *sorted(pairs))
        case "set" | "frozenset":
            members = sorted(_key_digest(item) for item in _members(value, path))
            return _hash(b"S" if found == "set" else b"F", *members)
        case "dtype":
            return _hash(b"D", _dtype_name(value, path).encode())
    _refuse(value, path)


def _key_digest(key: Any) -> bytes:
    # Python finds an integral float's or a bool's entry by the int, so a fold may hold either as the key.
    if isinstance(key, (bool, float)) and not (isinstance(key, float) and not key.is_integer()):
        key = int(key)
    if type(key) is tuple:
        return _hash(b"t", *(_key_digest(item) for item in key))
    return _digest(key, ())


# --- for those who encode many arrays, and keep digests as they go --------------------------------------------------


def array_payload(dtype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> bytes:
    """The payload of an array from its raw little-endian elements: what `encoded_array` takes."""
    return b"".join((_payload_head(dtype, shape), raw))


@lru_cache(maxsize=4096)
def _payload_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    header = msgspec.msgpack.encode((dtype, shape))
    return _header_length.pack(len(header)) + header


def encoded_array(payload: bytes) -> Any:
    """An array as `wire` would have it, from its payload."""
    return msgspec.msgpack.Ext(_ARRAY, payload)


#: By the first byte of an extension on the wire: where its payload begins, behind the byte that says its type.
_EXT_STARTS: Final = {0xC7: 3, 0xC8: 4, 0xC9: 6, 0xD4: 2, 0xD5: 2, 0xD6: 2, 0xD7: 2, 0xD8: 2}


def encoded_digest(raw: bytes | memoryview) -> bytes | None:
    """The digest of a value, if it is an array, from its encoded form; `None` if it is anything else."""
    start = _EXT_STARTS.get(raw[0])
    if start is None or raw[start - 1] != _ARRAY:
        return None
    return _hash(b"a", memoryview(raw)[start + 2 :])


@lru_cache(maxsize=4096)
def array_head(dtype: str, shape: tuple[int, ...], size: int) -> tuple[bytes, bytes]:
    """For an array of `size` bytes: what its raw elements follow on the wire, and what `array_digest` takes."""
    head = _payload_head(dtype, shape)
    length = len(head) + size
    if length < 1 << 8:
        start = struct.pack(">BBb", 0xC7, length, _ARRAY)
    elif length < 1 << 16:
        start = struct.pack(">BHb", 0xC8, length, _ARRAY)
    else:
        start = struct.pack(">BIb", 0xC9, length, _ARRAY)
    return start + head, head[2:]


def array_digest(head: bytes, raw: bytes | memoryview) -> bytes:
    """The digest of an array, from the second of `array_head` and its raw little-endian elements."""
    return _hash(b"a", head, raw)


def raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The elements of an array as `array_of` returns them, as bytes, without a copy."""
    return _raw(array)


def array_hash(dtype: str, shape: tuple[int, ...]) -> hashlib.blake2b:
    """A hash to update with an array's elements, piece by piece: its digest is then the array's."""
    state = hashlib.blake2b(b"a", digest_size=16)
    state.update(msgspec.msgpack.encode((dtype, shape)))
    return state


def list_digest(items: Iterable[bytes]) -> bytes:
    """The digest of a list, from those of its items."""
    return _hash(b"l", *items)


def dict_digest(items: Iterable[tuple[Any, bytes]]) -> bytes:
    """The digest of a dict, from its keys and the digests of its values."""
    return _hash(b"d", *sorted(_key_digest(path_key(key)) + value for key, value in items))
