"""Values as JSON: saves in answers, and arrays, interventions and live parameters in requests.

An array in an answer is a nested list of numbers, or an object `{"dtype", "shape", "base64"}` of its little-endian
elements. A request may have either. A reference is an object `{"dtype", "shape", "digest", "nbytes", "href"}`.
NaN and infinities are null in lists; base64 keeps them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from tracewire import ArrayRef, Live, TraceRejected, digest
from tracewire.traces.large import fetched
from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.wire.arrays import array_from_raw, array_of, raw_bytes
from tracewire_bus.wire.ids import is_encodable
from tracewire_bus.wire.kinds import Unsavable, is_array
from tracewire_bus.wire.messages import Block, Declared, Helper
from tracewire_bus.wire.packing import pack
from tracewire_bus.wire.refs import DTYPES

__all__ = ["Arrays", "Form", "arrays_in", "block_of", "inlined", "interventions_of", "to_json", "value_of", "values_of"]

Arrays: TypeAlias = Literal["list", "base64"]
"""How arrays stand in an answer."""
Form: TypeAlias = Literal["list", "base64", "reference", "small"]
"""With `small`, arrays of up to 1,024 elements are lists, and larger ones references."""

#: The most elements of a `small` array.
_SMALL = 1024

#: Depth of containers in a request's values.
_MAX_DEPTH = 64
_AT = re.compile(r" - at `\$\.?(.*?)`$")


# --- answers ----------------------------------------------------------------------------------------------------------


def to_json(value: Any, form: Form, trace_id: str) -> Any:
    """A saved value as what msgspec can encode as JSON. References stay references."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, ArrayRef):
        return _reference(value.dtype, value.shape, value.digest, value.nbytes, trace_id)
    if is_array(value):
        return _array(value, form, trace_id)
    if isinstance(value, Mapping):
        return {_key(key): to_json(item, form, trace_id) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item, form, trace_id) for item in value]
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"real": value.real, "imag": value.imag}
    return str(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else key.hex() if isinstance(key, bytes) else str(key)


def _array(value: Any, form: Form, trace_id: str) -> Any:
    array = array_of(value)
    if form == "reference" or (form == "small" and array.size > _SMALL):
        return _reference(array.dtype.name, array.shape, digest(array), array.nbytes, trace_id)
    if form == "base64" or array.dtype.kind == "c":
        raw = base64.b64encode(raw_bytes(array)).decode()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": raw}
    if array.dtype.name.startswith(("bfloat16", "float8")):
        array = array.astype(np.float32)
    return array.tolist()


def _reference(dtype: str, shape: tuple[int, ...], key: bytes, nbytes: int, trace_id: str) -> dict[str, Any]:
    href = f"/traces/{trace_id}/values/{key.hex()}"
    return {"dtype": dtype, "shape": list(shape), "digest": key.hex(), "nbytes": nbytes, "href": href}


def arrays_in(value: Any) -> Iterator[Any]:
    """The arrays and references in a value."""
    if isinstance(value, ArrayRef) or is_array(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from arrays_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from arrays_in(item)


async def inlined(value: Any, limit: int) -> Any:
    """`value` with downloaded arrays in place of its references, if these have at most `limit` bytes together.

    Otherwise the references stay.
    """
    large = sum(one.nbytes for one in arrays_in(value) if isinstance(one, ArrayRef))
    return value if not large or large > limit else await fetched(value)


# --- requests ---------------------------------------------------------------------------------------------------------


def value_of(value: Any, field: str, depth: int = 0) -> Any:
    """A value of a request: JSON, with arrays in place of objects `{"dtype", "shape", "base64"}`.

    Raises:
        TraceRejected: an array's object is malformed, or the value nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise TraceRejected(field, "the value nests too deep")
    if isinstance(value, dict):
        if value.keys() == {"dtype", "shape", "base64"}:
            return _array_of(value, field)
        return {key: value_of(item, f"{field}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [value_of(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)]
    return value


def values_of(values: Mapping[str, Any], field: str, *, arrays: bool = False) -> dict[str, Any]:
    """The values of a request by name, as `value_of`. With `arrays`, a list of numbers is a float32 array."""
    found = {}
    for name, value in values.items():
        plain = value_of(value, f"{field}.{name}")
        found[name] = _vector(plain, f"{field}.{name}") if arrays and isinstance(plain, list) else plain
    return found


def _check_texts(value: Any, field: str, depth: int = 0) -> None:
    """Check that all texts of a JSON value can be sent.

    Raises:
        TraceRejected: one has half of a surrogate pair, or the value nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise TraceRejected(field, "the value nests too deep")
    if isinstance(value, str):
        if not is_encodable(value):
            raise TraceRejected(field, "expected text, got half of a surrogate pair")
    elif isinstance(value, dict):
        for name, one in value.items():
            if not is_encodable(name):
                raise TraceRejected(field, "expected names of text, got half of a surrogate pair in one")
            _check_texts(one, f"{field}.{name}", depth + 1)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            _check_texts(one, f"{field}[{index}]", depth + 1)


def _array_of(value: dict[str, Any], field: str) -> np.ndarray[Any, Any]:
    dtype, shape, text = value["dtype"], value["shape"], value["base64"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise TraceRejected(f"{field}.dtype", f"expected one of {', '.join(sorted(DTYPES))}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise TraceRejected(f"{field}.shape", "expected a list of sizes")
    if not isinstance(text, str):
        raise TraceRejected(f"{field}.base64", "expected text")
    try:
        return array_from_raw(dtype, tuple(shape), base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error) as error:
        raise TraceRejected(f"{field}.base64", str(error)) from None


def _vector(value: Any, field: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise TraceRejected(field, "expected numbers in lists of equal lengths") from None
    return array


#: The classes of interventions by the `do` of their JSON form.
_KINDS: dict[str, type[Declared]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Declared)}
#: Fields of interventions that are arrays where they are lists.
_VECTORS = ("vector", "direction", "weight", "bias", "values", "matrix", "basis", "weights", "mean")


def interventions_of(given: Sequence[Any], field: str) -> list[Declared]:
    """Declared interventions from their JSON form: `{"do": "steer", "at": "residual(4)", "vector": [...]}`.

    Raises:
        TraceRejected: one of them is malformed.
    """
    found: list[Declared] = []
    for index, one in enumerate(given):
        where = f"{field}[{index}]"
        if not isinstance(one, dict):
            raise TraceRejected(where, 'expected an object such as {"do": "probe", "name": ..., "at": ...}')
        _refuse_unknown(one, _kind_of(one, where), where)
        # A vector's numbers are no texts, and may be many.
        _check_texts({name: value for name, value in one.items() if not _is_numbers(name, value)}, where)
        vectors = {name: one[name] for name in _VECTORS if isinstance(one.get(name), list | dict)}
        arrays = {name: _vector_of(value, f"{where}.{name}") for name, value in vectors.items()}
        try:
            plain = msgspec.convert({**one, **dict.fromkeys(arrays)}, Declared)
        except msgspec.ValidationError as error:
            text = str(error)
            place = _AT.search(text)
            name = f".{place[1]}" if place and place[1] else ""
            raise TraceRejected(where + name, _AT.sub("", text)) from None
        found.append(msgspec.structs.replace(plain, **arrays))
    return found


def _is_numbers(name: str, value: Any) -> bool:
    return name in _VECTORS and isinstance(value, list)


def _kind_of(given: Mapping[str, Any], where: str) -> type[Declared]:
    """The class of an intervention, by the `do` of its JSON form."""
    do = given.get("do")
    if isinstance(do, str) and do in _KINDS:
        return _KINDS[do]
    near = get_close_matches(do, _KINDS, 1) if isinstance(do, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    got = f", got {do!r}" if "do" in given else ""
    raise TraceRejected(f"{where}.do", f"expected one of {', '.join(_KINDS)}{got}{hint}")


def _refuse_unknown(given: Mapping[str, Any], kind: type[Declared], where: str) -> None:
    known = kind.__struct_fields__
    for name in sorted(given.keys() - {"do"} - set(known)):
        raise TraceRejected(f"{where}.{name}", f"unknown field; {given['do']} has {', '.join(known)}")


def _vector_of(value: Any, field: str) -> Any:
    """An array, or the live parameter that `{"live": name}` names."""
    plain = value_of(value, field)
    if isinstance(plain, list):
        return _vector(plain, field)
    if isinstance(plain, dict):
        if plain.keys() != {"live"} or not isinstance(plain["live"], str):
            raise TraceRejected(field, 'expected numbers, an array, or {"live": name}')
        return Live(plain["live"])
    return plain


class BlockBody(msgspec.Struct, forbid_unknown_fields=True):
    """A block in a request: the body of its function as source, and what it uses."""

    source: str
    name: str = "block"
    filename: str = "<request>"
    first_line: int = 1
    parameters: tuple[str, str, str] = ("model", "tracer", "live")
    variables: dict[str, Any] = {}
    helpers: list[Helper] = []
    modules: dict[str, str] = {}
    imports: dict[str, tuple[str, str]] = {}


def block_of(given: Mapping[str, Any], field: str) -> Block:
    """A block from its JSON form.

    Raises:
        TraceRejected: it is malformed.
    """
    # The variables are packed, which checks them.
    _check_texts({name: value for name, value in given.items() if name != "variables"}, field)
    try:
        body = msgspec.convert(given, BlockBody)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _AT.search(text)
        raise TraceRejected(f"{field}.{place[1]}" if place and place[1] else field, _AT.sub("", text)) from None
    try:
        parse_source(body.source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TraceRejected(f"{field}.source", f"expected the body of a Python function: {error}") from None
    try:
        variables = pack(value_of(body.variables, f"{field}.variables"))
    except Unsavable as error:
        raise TraceRejected(f"{field}.variables", str(error)) from None
    return Block(
        name=body.name,
        source=body.source,
        filename=body.filename,
        first_line=body.first_line,
        parameters=body.parameters,
        variables=variables,
        helpers=body.helpers,
        modules=body.modules,
        imports=body.imports,
    )
