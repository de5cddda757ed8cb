"""Names of the library in interventions: `Steer("residual(12)", "calm@3")`.

A client replaces the names in a submission by the arrays of the entries, once, before it checks and sends them. So a
trace has one version of each entry, whatever is put later, and an engine fetches each array once (`vectors.py`). An
entry states its model and its location. The client refuses a name whose entry belongs elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tracewire.error_mapping import bus_errors
from tracewire.errors import TraceRejected
from tracewire_bus.store.library import EntryMissing, Stored, is_entry_name, is_space
from tracewire_bus.wire.messages import Ablate, Clamp, Coordinates, Declared, Hold, Probe, Project, Steer

if TYPE_CHECKING:
    import numpy as np

    from tracewire_bus.bus import Bus
    from tracewire_bus.domain.tree import ModuleTree

    from .served_models import ServedModel

__all__ = ["EntryName", "NamedArrays", "layers_of", "parsed", "space_of"]

#: Bytes of arrays that a client keeps for further traces.
KEPT_BYTES: Final = 64 * 1024 * 1024
#: The field of an intervention that a name may stand in, and the kinds of entries that fit it.
_FIELDS: Final[dict[type, tuple[str, tuple[str, ...]]]] = {
    Steer: ("vector", ("vector",)),
    Clamp: ("direction", ("vector",)),
    Ablate: ("direction", ("vector", "subspace")),
    Hold: ("vector", ("vector",)),
    Probe: ("weight", ("probe", "vector", "subspace")),
    Project: ("basis", ("subspace", "vector")),
    Coordinates: ("basis", ("subspace", "vector")),
}
_FORM: Final = "the name of an entry of the library, as 'calm' or 'calm@3'"


class EntryName(NamedTuple):
    """`[TENANT:]NAME[@VERSION]`. Without a tenant, the entry is in the shared space."""

    space: str
    name: str
    version: int | None

    def __str__(self) -> str:
        return (f"{self.space}:" if self.space else "") + self.name + (f"@{self.version}" if self.version else "")


def parsed(text: str) -> EntryName | None:
    """The parts of the name of an entry; None if the text is none."""
    space, _, rest = text.rpartition(":")
    name, at, version = rest.partition("@")
    if not is_entry_name(name) or not is_space(space) or text.startswith(":"):
        return None
    if at and not re.fullmatch(r"[1-9][0-9]{0,14}", version):
        return None
    return EntryName(space, name, int(version) if at else None)


def space_of(trace_id: str) -> str:
    """The space of the tenant whose trace has this id; `""` without one."""
    space = trace_id.rpartition(":")[0].partition(":")[0]
    return space if is_space(space) else ""


def layers_of(arrays: Sequence[str]) -> dict[str, list[int]]:
    """The layers for which an entry has an array each (`vector.12`), by the array's plain name."""
    found: dict[str, list[int]] = {}
    for name in arrays:
        plain, _, layer = name.rpartition(".")
        if plain and layer.isdecimal():
            found.setdefault(plain, []).append(int(layer))
    return {plain: sorted(layers) for plain, layers in found.items()}


class NamedArrays:
    """The entries of the library that a client's traces name, with their arrays, the latest of which it keeps."""

    def __init__(self, open_bus: Callable[[], Bus]) -> None:
        self._open_bus = open_bus
        self._kept: OrderedDict[tuple[str, str], np.ndarray[Any, Any]] = OrderedDict()
        self._bytes = 0

    async def resolve(
        self, interventions: Sequence[Declared], model: ServedModel, space: str = ""
    ) -> tuple[list[Declared], dict[str, str]]:
        """Interventions with arrays in place of names, and the version of each entry by the field that named it.

        A name without a tenant is looked for in `space`, and then in the shared space. A trace in a space names no
        entry of another one.

        Raises:
            TraceRejected: there is no such entry, it is another tenant's, or it does not fit the field, the model or
                the location.
            BusUnavailable: Redis does not answer.
        """
        found: list[Declared] = list(interventions)
        versions: dict[str, str] = {}
        for index, one in enumerate(interventions):
            name, kinds = _FIELDS.get(type(one), ("", ()))
            value = getattr(one, name, None) if name else None
            if type(value) is not str:
                continue
            field = f"interventions[{index}].{name}"
            with bus_errors():
                stored = await self._find(value, space, field)
                entry = _Fitting(stored, field)
                array = entry.array(one, kinds, model)
                changed: dict[str, Any] = {name: await self.fetch(stored, array, field)}
                if isinstance(one, Probe) and one.bias is None and (bias := entry.bias(array)) is not None:
                    changed["bias"] = await self.fetch(stored, bias, field)
            found[index] = _encoded(one, changed)
            versions[field] = str(EntryName(stored.space, stored.name, stored.version))
        return found, versions

    async def _find(self, text: str, space: str, field: str) -> Stored:
        asked = parsed(text)
        if asked is None:
            raise TraceRejected(field, f"expected an array, or {_FORM}, got {text[:80]!r}")
        if space and asked.space not in ("", space):
            # A gateway's user of Redis reads the entries of all tenants.
            raise TraceRejected(
                field, f"expected an entry of the trace's tenant {space!r} or a shared one, got {text[:80]!r}"
            )
        library = self._open_bus().library
        spaces = [asked.space] if asked.space else [*dict.fromkeys((space, ""))]
        for one in spaces:
            stored = await library.find(one, asked.name, asked.version)
            if stored is not None and stored.removed is not None:
                raise TraceRejected(field, f"{text!r} was removed from the library by {stored.removed_by}")
            if stored is not None:
                return stored
        names = [str(EntryName(one.space, one.name, one.version)) for at in spaces for one in await library.load(at)]
        near = difflib.get_close_matches(text, names, 1, 0.5)
        raise TraceRejected(
            field, f"the library has no entry {text!r}" + (f"; the nearest is {near[0]!r}" if near else "")
        )

    async def fetch(self, stored: Stored, name: str, field: str = "") -> np.ndarray[Any, Any]:
        """An array of an entry, read-only. A second call for the same array asks nobody.

        Raises:
            TraceRejected: Redis has lost the array.
        """
        key = stored.upload, name
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            array = await self._open_bus().library.fetch(stored, name)
        except EntryMissing as error:
            raise TraceRejected(field, f"an array of the library is lost: {error}") from None
        if array.nbytes <= KEPT_BYTES:
            self._kept[key] = array
            self._bytes += array.nbytes
            while self._bytes > KEPT_BYTES:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return array


class _Fitting:
    """An entry that a field names, and whether it fits there."""

    def __init__(self, stored: Stored, field: str) -> None:
        assert stored.entry is not None
        self._entry, self._field = stored.entry, field
        self._name = f"{stored.name}@{stored.version}"

    def array(self, one: Any, kinds: Sequence[str], model: ServedModel) -> str:
        """The name of the array for an intervention.

        Raises:
            TraceRejected: the entry is of another kind, model or location.
        """
        entry = self._entry
        if entry.kind not in kinds:
            raise self._refused(
                f"{self._name} is of the kind {entry.kind!r}, and {type(one).__name__} takes {_or(kinds)}"
            )
        if entry.model not in ("", model.info.name, model.info.path):
            raise self._refused(f"{self._name} is of the model {entry.model!r}, and not of {model.info.name!r}")
        plain = "weight" if entry.kind == "probe" else "vector" if entry.kind == "vector" else "basis"
        for tree in model.trees:
            self._check_place(one.at, plain, tree)
        return plain if plain in entry.arrays else f"{plain}.{self._layer(one.at, model.trees[0])}"

    def bias(self, weight: str) -> str | None:
        """The name of the bias beside a probe's weight, if it has one."""
        name = weight.replace("weight", "bias", 1)
        return name if self._entry.kind == "probe" and name in self._entry.arrays else None

    def _check_place(self, at: str, plain: str, tree: ModuleTree) -> None:
        from tracewire_bus.domain.intervention_checks import find_sites

        try:
            sites = find_sites(tree, at)[0]
        except ValueError as error:
            raise TraceRejected(f"{self._field.rpartition('.')[0]}.at", str(error)) from None
        if plain not in self._entry.arrays:
            layers = layers_of([*self._entry.arrays]).get(plain, [])
            if len(sites) != 1 or self._layer(at, tree) not in layers:
                have = ", ".join(map(str, layers))
                raise self._refused(
                    f"{self._name} has a vector for each of the layers {have}, and {at!r} is none of them alone: name "
                    "one layer in each intervention"
                )
            return
        if not self._entry.at:
            return
        try:
            own = find_sites(tree, self._entry.at)[0]
        except ValueError:
            raise self._refused(f"{self._name} belongs to {self._entry.at!r}, which this model does not have") from None
        if any(site not in own for site in sites):
            raise self._refused(
                f"{self._name} belongs to {self._entry.at!r}, and not to {at!r} (client.library.load gives its array, "
                "which fits anywhere)"
            )

    @staticmethod
    def _layer(at: str, tree: ModuleTree) -> int:
        from tracewire_bus.domain.intervention_checks import find_sites

        (site, *_), _ = find_sites(tree, at)
        return int(site.path.rpartition(".")[2]) if site.value == "residual" else -1

    def _refused(self, message: str) -> TraceRejected:
        return TraceRejected(self._field, message)


def _or(kinds: Sequence[str]) -> str:
    return " or ".join(map(repr, kinds))


def _encoded(one: Declared, changed: dict[str, Any]) -> Declared:
    from tracewire_bus.domain.intervention_checks import normalize

    return normalize([msgspec.structs.replace(one, **changed)])[0]
