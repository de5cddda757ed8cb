"""The scheduled changes of one request, as the adapter sends them to the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tracewire_bus.wire.messages import ScheduledChange
from tracewire_bus.wire.packing import decoder

__all__ = ["Scheduled", "decode_schedule", "encode_schedule"]


class Scheduled(msgspec.Struct, array_like=True, frozen=True):
    """A change that holds from the token `index` on, for one choice (`None`: each). `values` are decoded."""

    index: int
    choice: int | None
    values: dict[str, Any]


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    index: int
    choice: int | None
    values: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode = decoder(list[Scheduled])


def encode_schedule(changes: Iterable[ScheduledChange], invoke: int) -> bytes | None:
    """The changes of one prompt, in the order of their tokens; `None` if there are none."""
    own = [change for change in changes if change.invoke in (None, invoke)]
    if not own:
        return None
    ordered = sorted(own, key=lambda change: change.index)
    return _encode([_Packed(change.index, change.choice, msgspec.Raw(change.values)) for change in ordered])


def decode_schedule(encoded: bytes, choice: int) -> list[Scheduled]:
    """The changes of one choice, in order."""
    found: list[Scheduled] = _decode(encoded)
    return [change for change in found if change.choice in (None, choice)]
