"""References to the arrays of declared interventions, as a client and an adapter make them, without either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tracewire_bus.store.vectors import reference_to
from tracewire_bus.wire.arrays import payload_parts
from tracewire_bus.wire.messages import Declared
from tracewire_bus.wire.packing import wire
from tracewire_bus.wire.refs import ARRAY, ArrayRef, encode_ref
from tracewire_engine.protocol.input_files import vector_path

__all__ = ["by_reference", "encoded"]


def encoded(array: Any) -> tuple[ArrayRef, bytes]:
    """The reference to an array, and its encoded form."""
    payload = bytes(wire(array).data)
    return reference_to(payload), payload


def by_reference(one: Declared, folder: Path) -> Declared:
    """A normalized intervention with references in place of its arrays of any size, which are files in `folder`."""
    changed = {}
    for name in one.__struct_fields__:
        value = getattr(one, name)
        if isinstance(value, msgspec.msgpack.Ext) and value.code == ARRAY:
            payload = bytes(value.data)
            ref = reference_to(payload)
            vector_path(folder, ref).write_bytes(payload_parts(payload)[2])
            changed[name] = encode_ref(ref)
    return msgspec.structs.replace(one, **changed) if changed else one
