"""Arrays of declared interventions in the client: stored once as vectors, and referred to by every trace that has them.

See `tracewire_bus.store.vectors`. An array that some engine of the model could not fetch, since the engine's version
knows no vectors, stays in the submission. So does one that this client's user may not store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tracewire.errors import TraceRejected, ValueMissing
from tracewire_bus.store.vectors import VECTOR_BYTES, reference_to
from tracewire_bus.transport.errors import NotAllowed
from tracewire_bus.wire.codec import schema_version
from tracewire_bus.wire.refs import ARRAY, ArrayRef, encode_ref

if TYPE_CHECKING:
    from tracewire_bus.store.vectors import Vectors
    from tracewire_bus.wire.messages import Declared, EngineInfo, Submission

__all__ = ["ReferredArrays", "with_saved_arrays"]

logger = logging.getLogger("tracewire")

#: The first schema of engines that fetch vectors.
_SINCE = 2, 2


async def with_saved_arrays(submission: Submission) -> Submission:
    """A submission with the arrays themselves in place of references to arrays that other traces saved.

    Raises:
        TraceRejected: one cannot be downloaded; names the field.
    """
    from tracewire_bus.domain.intervention_checks import encode_arrays

    changed = list(submission.interventions)
    for index, one in enumerate(changed):
        arrays = {}
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if type(value) is ArrayRef:
                try:
                    arrays[name] = await value.load()
                except (ValueMissing, RuntimeError) as error:
                    raise TraceRejected(f"interventions[{index}].{name}", str(error)) from error
        if arrays:
            changed[index] = encode_arrays(one, arrays)
    return msgspec.structs.replace(submission, interventions=changed)


class _Array(NamedTuple):
    """An encoded array, the first field that has it, and whether its content was checked before."""

    payload: bytes
    field: str
    checked: bool


class ReferredArrays:
    """The large arrays in the interventions of one submission.

    Attributes:
        interventions: the interventions with references in place of these arrays.
    """

    def __init__(self, submission: Submission, vectors: Vectors, engines: Iterable[EngineInfo]) -> None:
        self._vectors = vectors
        self._given = submission.interventions
        self._arrays: dict[ArrayRef, _Array] = {}
        self.interventions: list[Declared] = submission.interventions
        if self._given and all(map(_fetches_vectors, engines)):
            self.interventions = [self._referring(one, f"interventions[{at}]") for at, one in enumerate(self._given)]

    def _referring(self, one: Declared, where: str) -> Declared:
        changed = {}
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if type(value) is not msgspec.msgpack.Ext or value.code != ARRAY:
                continue
            payload = bytes(value.data)
            if len(payload) >= VECTOR_BYTES:
                known = self._vectors.known(payload)
                ref = known if known is not None else reference_to(payload)
                self._arrays.setdefault(ref, _Array(payload, f"{where}.{name}", known is not None))
                changed[name] = encode_ref(ref)
        return msgspec.structs.replace(one, **changed) if changed else one

    def check(self) -> None:
        """Check what the checks by reference do not see.

        Raises:
            TraceRejected: an array has something else than finite numbers.
            LimitExceeded: the arrays are too large together.
        """
        from tracewire_bus.domain.intervention_checks import DeclarationError, check_content
        from tracewire_bus.domain.limits import check_vectors
        from tracewire_bus.wire.arrays import decode_array

        check_vectors(self._arrays)
        for array in self._arrays.values():
            if not array.checked:
                try:
                    check_content(decode_array(memoryview(array.payload)), array.field)
                except DeclarationError as error:
                    raise TraceRejected(error.field, error.message) from None

    async def store(self) -> list[Declared]:
        """Store those that were not stored lately. Returns the interventions to submit.

        Raises:
            BusFull: Redis has no memory left.
            BusUnavailable: Redis does not answer.
        """
        if self._arrays:
            try:
                await self._vectors.store({ref: array.payload for ref, array in self._arrays.items()})
            except NotAllowed as error:
                logger.warning("Redis does not let this client store vectors, so each trace carries its own: %s", error)
                return self._given
        return self.interventions


def _fetches_vectors(engine: EngineInfo) -> bool:
    version = schema_version(engine.schema)
    return version is not None and version >= _SINCE
