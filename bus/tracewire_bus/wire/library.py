"""Entries of the library: what a named array or set of arrays is, of which model it is, and how it was made."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from .digests import content_hash

__all__ = ["FORMAT", "EntryArray", "EntryMessage", "LibraryKind", "entry_digest"]

#: The form of these structs. A reader of an older one refuses a newer one.
FORMAT = 1

LibraryKind: TypeAlias = Literal["vector", "subspace", "probe", "autoencoder"]
"""What an entry holds:

- `vector`: directions `[hidden]`.
- `subspace`: orthonormal rows `[directions, hidden]`.
- `probe`: weights `[hidden]` or `[outputs, hidden]`, and perhaps a `bias`.
- `autoencoder`: the arrays of a sparse autoencoder, by the names of SAELens (`W_enc`, `b_enc`, `W_dec`, `b_dec`, ...).
"""


class EntryArray(msgspec.Struct, kw_only=True):
    """An array of an entry: its dtype, its shape, and the BLAKE2b digest of both and of its elements."""

    dtype: str
    shape: list[int]
    digest: bytes


class EntryMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an entry of the library says about its arrays.

    `arrays` are the arrays by name. The array of one location has a plain name (`vector`); where an entry has one for
    each of several layers, `.` and the layer's index follow (`vector.12`). `at` is the location, as of an intervention;
    `""` for arrays by layer, which belong to the residual stream, and for entries that fit any location. `model` is the
    name of the model, `""` for any. `provenance` says how it was made, `effect` what was measured, `settings` what its
    kind needs besides arrays. `by` is the client that put it.
    """

    name: str
    kind: LibraryKind
    arrays: dict[str, EntryArray]
    model: str = ""
    at: str = ""
    description: str = ""
    licence: str = ""
    provenance: dict[str, Any] = {}
    effect: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    by: str = ""


def entry_digest(entry: EntryMessage) -> str:
    """A digest, in hexadecimal, of all that decides what an entry does: its kind, place, settings and arrays."""
    deciding = (entry.kind, entry.model, entry.at, entry.settings, sorted(entry.arrays.items()))
    encoded = msgspec.msgpack.encode(deciding, order="deterministic")
    state = content_hash("uint8", (len(encoded),))
    state.update(encoded)
    return state.hexdigest()
