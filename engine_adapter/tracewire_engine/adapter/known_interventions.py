"""Decodes submissions, and the declared interventions that many of them share once.

Services send the same interventions with trace after trace. Those at many layers take longer to decode than all the
rest of a submission.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from tracewire_bus.wire.codec import decode_submission
from tracewire_bus.wire.messages import Declared, Submission
from tracewire_bus.wire.packing import decoder

__all__ = ["KnownInterventions"]

#: How many lists of interventions are kept; and the most encoded bytes of one, and of all of them.
_MOST, _LONGEST, _MOST_BYTES = 64, 128 * 1024, 2 * 1024 * 1024
_NONE = msgspec.Raw(b"\x90")
#: A submission whose interventions are still encoded.
_Apart: Any = msgspec.defstruct("_Apart", [("interventions", msgspec.Raw, _NONE)], bases=(Submission,))
_decode_apart = decoder(_Apart)
_decode_interventions = decoder(list[Declared])
_OTHERS = tuple(name for name in Submission.__struct_fields__ if name != "interventions")


class KnownInterventions:
    """The interventions of submissions that came lately, by their encoded form."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, list[Declared]] = OrderedDict()
        self._bytes = 0

    def decode(self, data: bytes | memoryview) -> tuple[Submission, bytes]:
        """Decode a submission. Also returns its interventions as they are encoded.

        Other submissions may share the decoded interventions, so the caller does not change them.

        Raises:
            msgspec.ValidationError: a field has a wrong type.
            msgspec.DecodeError: `data` is not msgpack, or a value in it is malformed.
        """
        apart = _decode_apart(data)
        encoded = bytes(apart.interventions)
        interventions = self._kept.get(encoded)
        if interventions is not None:
            self._kept.move_to_end(encoded)
        elif encoded == _NONE:
            interventions = []
        else:
            try:
                interventions = _decode_interventions(encoded)
            except msgspec.DecodeError:
                # The error of the whole submission names the field within it.
                return decode_submission(data), encoded
            self._keep(encoded, interventions)
        others = {name: getattr(apart, name) for name in _OTHERS}
        return Submission(interventions=interventions, **others), encoded

    def _keep(self, encoded: bytes, interventions: list[Declared]) -> None:
        if len(encoded) > _LONGEST:
            return
        self._kept[encoded] = interventions
        self._bytes += len(encoded)
        while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
            self._bytes -= len(self._kept.popitem(last=False)[0])
