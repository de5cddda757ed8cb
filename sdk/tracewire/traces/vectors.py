"""Arrays of declared interventions in the client: stored once as vectors, and referred to by every trace that has them.

See `tracewire_bus.store.vectors`. An array that some engine of the model could not fetch, since the engine's version
knows no vectors, stays in the submission. So does one that this client's user may not store.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tracewire.errors import TraceRejected, ValueMissing
from tracewire_bus.store.vectors import VECTOR_BYTES, reference_to
from tracewire_bus.transport.errors import NotAllowed
from tracewire_bus.wire.codec import schema_version
from tracewire_bus.wire.refs import ARRAY, ArrayRef, encode_ref

if TYPE_CHECKING:
    from tracewire_bus.store.vectors import Vectors
    from tracewire_bus.wire.messages import Declared, EngineInfo, Submission

__all__ = ["ReferredArrays", "ReferredLists", "with_saved_arrays"]

logger = logging.getLogger("tracewire")

#: The first schema of engines that fetch vectors.
_SINCE = 2, 2
#: How many lists of interventions a client remembers with their references, and the most bytes of the lists' arrays.
_LISTS: Final = 64
_LISTS_BYTES: Final = 32 << 20


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


@dataclass(slots=True)
class _Referred:
    """A list of interventions, the large arrays in it, and the list with references in their place.

    Attributes:
        stored_at: when the client stored the first of the arrays, by the event loop's clock.
    """

    given: Sequence[Declared]
    arrays: Mapping[ArrayRef, _Array]
    interventions: list[Declared]
    size: int
    stored_at: float = -math.inf


class ReferredLists:
    """The lists of interventions that a client's traces brought last, whose arrays were checked.

    The normal form of an intervention with arrays is an object of its own, and is the same one as long as the caller
    does not change the intervention (`normal_forms.py`). So a list of the same forms needs no other look at them. An
    intervention without arrays is the caller's object, which may change, so lists with one are not remembered.
    """

    def __init__(self) -> None:
        #: By the `id`s of the interventions, which are kept, so that no others have their `id`s. The oldest use first.
        self._kept: OrderedDict[tuple[int, ...], _Referred] = OrderedDict()
        self._bytes = 0

    def get(self, given: Sequence[Declared]) -> _Referred | None:
        """What is known of a list, if it is."""
        key = tuple(map(id, given))
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, given: Sequence[Declared], arrays: Mapping[ArrayRef, _Array], interventions: list[Declared]) -> None:
        """Remember a list, if there are references in each of its interventions."""
        if any(one is plain for one, plain in zip(interventions, given, strict=True)):
            return
        key, size = tuple(map(id, given)), sum(len(array.payload) for array in arrays.values())
        if key in self._kept or size > _LISTS_BYTES:
            return
        self._kept[key] = _Referred(tuple(given), arrays, interventions, size)
        self._bytes += size
        while self._bytes > _LISTS_BYTES or len(self._kept) > _LISTS:
            self._bytes -= self._kept.popitem(last=False)[1].size


class ReferredArrays:
    """The large arrays in the interventions of one submission.

    Args:
        submission: the submission.
        vectors: those of the client's bus.
        engines: those that serve the model.
        lists: the client's.

    Attributes:
        interventions: the interventions with references in place of these arrays.
    """

    def __init__(
        self, submission: Submission, vectors: Vectors, engines: Iterable[EngineInfo], lists: ReferredLists
    ) -> None:
        self._vectors, self._lists = vectors, lists
        self._given = submission.interventions
        self._arrays: dict[ArrayRef, _Array] = {}
        self._known: _Referred | None = None
        self.interventions: list[Declared] = submission.interventions
        if not self._given or not all(map(_fetches_vectors, engines)):
            return
        self._known = lists.get(self._given)
        if self._known is not None:
            self.interventions = self._known.interventions
        else:
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

        if self._known is not None:
            return
        check_vectors(self._arrays)
        for array in self._arrays.values():
            if not array.checked:
                try:
                    check_content(decode_array(memoryview(array.payload)), array.field)
                except DeclarationError as error:
                    raise TraceRejected(error.field, error.message) from None
        self._lists.keep(self._given, self._arrays, self.interventions)

    async def store(self) -> list[Declared]:
        """Store those that were not stored lately. Returns the interventions to submit.

        Raises:
            BusFull: Redis has no memory left.
            BusUnavailable: Redis does not answer.
        """
        known = self._known
        arrays = self._arrays if known is None else known.arrays
        if not arrays or (known is not None and known.stored_at > self._vectors.kept_since):
            return self.interventions
        try:
            await self._vectors.store({ref: array.payload for ref, array in arrays.items()})
        except NotAllowed as error:
            logger.warning("Redis does not let this client store vectors, so each trace carries its own: %s", error)
            return self._given
        if known is not None:
            known.stored_at = self._vectors.stored_at(arrays)
        return self.interventions


def _fetches_vectors(engine: EngineInfo) -> bool:
    version = schema_version(engine.schema)
    return version is not None and version >= _SINCE
