"""An entry of the library as callers see it, and the checks of one that is put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypedDict, get_args

import msgspec

from tracewire.checks import is_sendable_text, shown
from tracewire.errors import InvalidEntry
from tracewire.traces.library_names import EntryName, layers_of
from tracewire_bus.store.library import MAX_ENTRY_BYTES, Stored, described
from tracewire_bus.wire.library import EntryMessage, LibraryKind, entry_digest

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PLAIN", "EntryOptions", "LibraryEntry", "checked_arrays", "checked_message"]

#: The name of the array that an entry of a kind has, and how many dimensions that array may have.
PLAIN: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "vector": ("vector", (1,)),
    "subspace": ("basis", (2,)),
    "probe": ("weight", (1, 2)),
}
_KINDS: Final = get_args(LibraryKind)
_TEXTS: Final = ("model", "at", "description", "licence")
_DICTS: Final = ("provenance", "effect", "settings")


class EntryOptions(TypedDict, total=False):
    """What an entry says, by keyword.

    `kind` is `"vector"` (the default), `"subspace"`, `"probe"` or `"autoencoder"`. `model` is the model's name, `at`
    the location, such as `"residual(12)"`; an entry without them fits any. `licence` is a name such as `"MIT"`.
    `provenance`, `effect` and `settings` are dicts of plain values. `replacing` is the version that must be the newest,
    0 for none.
    """

    kind: LibraryKind
    model: str
    at: str
    description: str
    licence: str
    provenance: Mapping[str, Any]
    effect: Mapping[str, Any]
    settings: Mapping[str, Any]
    replacing: int | None


class LibraryEntry(msgspec.Struct, frozen=True):
    """A version of a name in the library.

    Attributes:
        id: the name for interventions: `"calm@3"`, or `"red:calm@3"` in the space of the tenant `red`.
        tenant: the tenant whose space it is in; `""` for the shared one.
        name, version: its name, and its number from 1 on.
        kind: `"vector"`, `"subspace"`, `"probe"` or `"autoencoder"`.
        model: the name of the model; `""` for any.
        at: the location; `""` for any, and for arrays by layer.
        layers: the layers that have an array of their own; empty for an entry of one location.
        shapes: the arrays' shapes, by name.
        description, licence: what it is, and under which licence.
        provenance: how it was made.
        effect: what was measured.
        settings: what its kind needs besides arrays.
        by: the client that put it.
        time: when it was put, in seconds since the epoch by Redis's clock.
        digest: of its kind, model, place, settings and arrays, in hexadecimal.
        removed: when it was removed, or None.
        removed_by: the client that removed it, with `_` for blanks.
    """

    id: str
    tenant: str
    name: str
    version: int
    kind: str = ""
    model: str = ""
    at: str = ""
    layers: tuple[int, ...] = ()
    shapes: dict[str, tuple[int, ...]] = {}
    description: str = ""
    licence: str = ""
    provenance: dict[str, Any] = {}
    effect: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    by: str = ""
    time: float = 0.0
    digest: str = ""
    removed: float | None = None
    removed_by: str = ""

    @classmethod
    def of(cls, stored: Stored) -> LibraryEntry:
        """An entry as Redis has it."""
        id_ = str(EntryName(stored.space, stored.name, stored.version))
        first: dict[str, Any] = {"id": id_, "tenant": stored.space, "name": stored.name, "version": stored.version}
        first["time"] = stored.time
        one = stored.entry
        if one is None:
            return cls(**first, removed=stored.removed, removed_by=stored.removed_by)
        same = {name: getattr(one, name) for name in (*_TEXTS, *_DICTS, "kind", "by")}
        layers = tuple(layers_of([*one.arrays]).get(PLAIN.get(one.kind, ("",))[0], ()))
        shapes = {name: tuple(array.shape) for name, array in one.arrays.items()}
        return cls(**first, **same, layers=layers, shapes=shapes, digest=entry_digest(one))


def checked_message(name: str, arrays: Any, given: Mapping[str, Any], by: str) -> tuple[EntryMessage, dict[str, Any]]:
    """The entry to put, and its arrays by name.

    Raises:
        InvalidEntry: a field is wrong; the error names the field.
    """
    kind = given.get("kind", "vector")
    if kind not in _KINDS:
        raise InvalidEntry(name, "kind", f"expected one of {', '.join(map(repr, _KINDS))}, got {shown(kind)}")
    said: dict[str, Any] = {}
    for field in _TEXTS:
        said[field] = given.get(field, "")
        if not is_sendable_text(said[field]):
            raise InvalidEntry(name, field, f"expected text, got {shown(said[field])}")
    for field in _DICTS:
        value = given.get(field) or {}
        if not isinstance(value, Mapping) or not all(is_sendable_text(key) for key in value):
            raise InvalidEntry(name, field, f"expected a dict of plain values by name, got {shown(value)}")
        said[field] = _plain(name, field, value)
    own = checked_arrays(name, kind, arrays)
    if said["at"] and layers_of([*own]):
        raise InvalidEntry(name, "at", f"arrays by layer have their places by their layers, got {said['at']!r}")
    message = EntryMessage(
        name=name, kind=kind, arrays={key: described(array) for key, array in own.items()}, by=by, **said
    )
    return message, own


def _plain(name: str, field: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with NumPy's numbers as Python's."""
    try:
        encoded = msgspec.msgpack.encode(value, enc_hook=lambda one: one.tolist())
    except OverflowError:
        raise InvalidEntry(name, field, f"expected integers of at most 64 bits, got {shown(value)}") from None
    except (TypeError, ValueError, AttributeError):
        raise InvalidEntry(name, field, f"expected numbers, texts, lists and dicts, got {shown(value)}") from None
    decoded: dict[str, Any] = msgspec.msgpack.decode(encoded)
    return decoded


def checked_arrays(name: str, kind: str, given: Any) -> dict[str, Any]:
    """The arrays of an entry, by the names under which the library keeps them.

    Raises:
        InvalidEntry: an array is not of the kind's form, or has something else than finite numbers.
    """
    if kind == "autoencoder":
        if not isinstance(given, Mapping) or not given:
            raise InvalidEntry(name, "arrays", f"expected the arrays of an autoencoder by name, got {shown(given)}")
        found = {str(key): _array(name, f"arrays[{key!r}]", value, ()) for key, value in given.items()}
    else:
        plain, dimensions = PLAIN[kind]
        found = {}
        for key, value in given.items() if isinstance(given, Mapping) else [(plain, given)]:
            at = f"{plain}.{key}" if type(key) is int and key >= 0 else str(key)
            bias = kind == "probe" and at.partition(".")[0] == "bias"
            if not bias and at.partition(".")[0] != plain:
                expected = f"an array, or arrays by layer (0, 1, ...), or by the name {plain!r}"
                raise InvalidEntry(name, "arrays", f"expected {expected}, got the key {shown(key)}")
            found[at] = _array(
                name,
                f"arrays[{key!r}]" if isinstance(given, Mapping) else "arrays",
                value,
                (0, 1) if bias else dimensions,
            )
        if not found:
            raise InvalidEntry(name, "arrays", "expected at least one array, got none")
        if len({one.shape for key, one in found.items() if not key.startswith("bias")}) > 1:
            raise InvalidEntry(name, "arrays", "expected one shape for all layers, got several")
    nbytes = sum(one.nbytes for one in found.values())
    if nbytes > MAX_ENTRY_BYTES:
        raise InvalidEntry(name, "arrays", f"expected at most {MAX_ENTRY_BYTES} bytes of arrays, got {nbytes}")
    return found


def _array(name: str, field: str, value: Any, dimensions: tuple[int, ...]) -> np.ndarray[Any, Any]:
    import numpy as np

    from tracewire_bus.wire.arrays import array_of
    from tracewire_bus.wire.kinds import Unsavable, is_array

    try:
        array = array_of(value) if is_array(value) else np.asarray(value, np.float32)
    except (Unsavable, TypeError, ValueError, OverflowError) as error:
        raise InvalidEntry(name, field, f"expected an array of numbers: {error}") from None
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if dimensions and array.ndim not in dimensions:
        raise InvalidEntry(name, field, f"expected {_forms(dimensions)}, got shape {list(array.shape)}")
    try:
        finite = bool(np.isfinite(array.astype(np.float32)).all())
    except (TypeError, ValueError):
        raise InvalidEntry(name, field, f"expected an array of numbers, got dtype {array.dtype}") from None
    if not finite:
        raise InvalidEntry(name, field, "expected finite numbers, got NaN or an infinity in it")
    return np.ascontiguousarray(array) if array.ndim else array


def _forms(dimensions: tuple[int, ...]) -> str:
    forms = {0: "a number", 1: "shape [hidden]", 2: "shape [rows, hidden]"}
    return " or ".join(forms[one] for one in dimensions)
