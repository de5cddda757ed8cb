"""The saves of a trace as rows of tensors: the layer and position of each row, and the rows that filters keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tracewire.errors import NotAnArray, TraceRejected, TracewireError
from tracewire_bus.domain.intervention_checks import find_sites

if TYPE_CHECKING:
    import numpy as np

    from tracewire.traces.state import Result
    from tracewire_bus.domain.tree import ModuleTree

    Array = np.ndarray[Any, Any]

__all__ = ["Filters", "Location", "PromptRows", "Reading", "Series", "prompt_rows", "readings"]


@dataclass(frozen=True)
class Location:
    """Where the values of a tensor are from. `label` tells it from the others of its reading."""

    label: str
    layer: int | None
    name: str


@dataclass(frozen=True)
class Reading:
    """A declared intervention that saves: its name, its locations, and which positions its items have rows of.

    Attributes:
        several: whether an item has a dimension of locations.
        positions: as declared. With `last`, or a reduction over positions, an item has one row.
    """

    name: str
    locations: tuple[Location, ...]
    several: bool
    positions: str
    reduced: bool


def readings(interventions: Sequence[Any], tree: ModuleTree) -> list[Reading]:
    """The readings among declared interventions, with the locations that they have in this model.

    Raises:
        TraceRejected: one of them names a module that the model does not have, or two of them save under one name.
    """
    found: dict[str, Reading] = {}
    for index, one in enumerate(interventions):
        name, at = getattr(one, "name", None), getattr(one, "at", None)
        if name is None or at is None:
            continue
        if name in found:
            raise TraceRejected(f"interventions[{index}].name", f"two of them save as {name!r}")
        try:
            sites, several = find_sites(tree, at)
        except ValueError as error:
            raise TraceRejected(f"interventions[{index}].at", str(error)) from None
        positions = getattr(one, "positions", "last")
        reduced = positions != "last" and getattr(one, "reduce", "none") == "mean"
        found[name] = Reading(name, _locations(sites, tree), several, positions, reduced)
    return list(found.values())


def _locations(sites: Sequence[Any], tree: ModuleTree) -> tuple[Location, ...]:
    """The locations' layers if these differ, else their paths."""
    named = []
    for site in sites:
        layer = _layer(site.path, tree.layers)
        name = f"residual({layer})" if site.value == "residual" else site.location
        named.append((layer, name))
    layers = [layer for layer, _ in named]
    distinct = None not in layers and len(set(layers)) == len(layers)
    return tuple(Location(str(layer) if distinct else name, layer, name) for layer, name in named)


def _layer(path: str, layers: str) -> int | None:
    if not layers or not path.startswith(f"{layers}."):
        return None
    step = path.removeprefix(f"{layers}.").partition(".")[0]
    return int(step) if step.isdecimal() else None


@dataclass(frozen=True)
class Filters:
    """Filters of rows and of the values in a row. They run in the client, before anything is written.

    Attributes:
        positions: the positions of a sequence to keep, as Python indexes them.
        every: keep each position that this divides.
        keep_top: how many of the greatest values of each row to keep, with their indices.
        dtype: the dtype of floating-point values; None keeps the engine's.
    """

    positions: slice | tuple[int, ...] | None = None
    every: int = 1
    keep_top: int | None = None
    dtype: str | None = None

    @property
    def by_position(self) -> bool:
        """Whether the filters choose rows by position. They cannot choose among rows that have none."""
        return self.positions is not None or self.every != 1

    def chosen(self, positions: Array, length: int) -> Array:
        """Which of these positions, in a sequence of `length`, the filters keep: a mask."""
        import numpy as np

        mask = positions % self.every == 0
        if isinstance(self.positions, slice):
            mask &= np.isin(positions, np.arange(length)[self.positions])
        elif self.positions is not None:
            mask &= np.isin(positions, [one + length if one < 0 else one for one in self.positions])
        chosen: Array = mask
        return chosen

    def parts(self, parts: Mapping[str, Array]) -> dict[str, Array]:
        """The parts of a row that are kept, in the dtype that was asked for."""
        kept = dict(parts)
        if self.keep_top is not None and set(kept) == {""}:
            kept = _greatest(kept[""], self.keep_top)
        if self.dtype is not None:
            kept = {name: _as(array, self.dtype) for name, array in kept.items()}
        return kept


def _as(array: Array, dtype: str) -> Array:
    return array if array.dtype.kind in "biu" else array.astype(dtype)


def _greatest(array: Array, count: int) -> dict[str, Array]:
    """Of each row `[..., features]` the greatest values, greatest first, and their indices among the features."""
    import numpy as np

    if array.ndim < 2:
        return {"": array}
    count = min(count, array.shape[-1])
    # Float32 for what NumPy cannot sort fast.
    keys = array.astype("float32") if array.dtype.kind not in "fiu" else array
    indices = np.argpartition(keys, -count, axis=-1)[..., -count:]
    order = np.argsort(np.take_along_axis(keys, indices, -1), axis=-1, kind="stable")[..., ::-1]
    indices = np.take_along_axis(indices, order, -1)
    return {"values": np.take_along_axis(array, indices, -1), "indices": indices.astype(np.int32)}


@dataclass(frozen=True)
class Series:
    """The rows that one prompt has of one tensor, or of the parts of one (`values` and `indices`).

    Attributes:
        tensor: the tensor's name, before its parts'.
        parts: arrays `[rows, ...]` by their names, `""` for the tensor itself.
        positions: the position of each row in its sequence, or -1 if it is unknown.
        items: each row's number among those that the prompt had before any was left out.
    """

    tensor: str
    name: str
    location: Location
    parts: dict[str, Array]
    positions: Array
    items: Array

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(int(part.nbytes) for part in self.parts.values())


@dataclass(frozen=True)
class PromptRows:
    """The part of one prompt in a harvest. `token_ids` are the prompt's, then those that were sampled; `row` is the
    prompt's number in the data set.
    """

    key: int | str
    digest: str
    prompt_tokens: int
    token_ids: list[int]
    token_strings: list[str] | None
    text: str
    series: list[Series] = field(default_factory=list)
    row: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(one.nbytes for one in self.series)


_NOWHERE = Location("", None, "")
_KEEP_ALL = Filters()


async def prompt_rows(
    key: int | str, digest: str, result: Result, declared: Sequence[Reading], filters: Filters
) -> PromptRows:
    """The rows of one result, which has one choice. Downloads what it refers to.

    Raises:
        NotAnArray: a save is neither an array, nor a number, nor a list of these with rows of one shape.
        ValueMissing: a large array of it has expired.
    """
    if result.save_errors:
        where, reason = next(iter(result.save_errors.items()))
        raise TracewireError(f"the engine could not send {where.split('.', 2)[-1]!r}: {reason}")
    accepted = result.accepted
    prompt_ids = accepted.prompt_token_ids[0] if accepted is not None and accepted.prompt_token_ids else []
    prompt_tokens = accepted.prompt_tokens[0] if accepted is not None and accepted.prompt_tokens else len(prompt_ids)
    strings = None
    if accepted is not None and accepted.prompt_token_strings and result.token_strings is not None:
        strings = [*accepted.prompt_token_strings[0], *result.token_strings]
    rows = PromptRows(key, digest, prompt_tokens, [*prompt_ids, *result.token_ids], strings, result.text)
    known = {one.name: one for one in declared}
    for name in result.saves:
        value = await result.load(name, exact=True)
        reading = known.get(name)
        if reading is None:
            rows.series.append(_undeclared(name, value, filters))
        else:
            rows.series.extend(_declared(reading, value, rows, filters))
    return rows


def _undeclared(name: str, value: Any, filters: Filters) -> Series:
    """The rows of a block's save: the items of a list, or those of an array's first dimension."""
    import numpy as np

    parts = _stacked(name, value) if isinstance(value, list | tuple) else _leaves(name, value)
    parts = {part: array[None] if array.ndim == 0 else array for part, array in parts.items()}
    count = _count(name, parts)
    return Series(name, name, _NOWHERE, filters.parts(parts), np.full(count, -1), np.arange(count))


def _declared(reading: Reading, value: Any, rows: PromptRows, filters: Filters) -> list[Series]:
    import numpy as np

    length, prompt = len(rows.token_ids) or rows.prompt_tokens, rows.prompt_tokens
    by_step = reading.positions == "last" or reading.reduced
    parts = _stacked(reading.name, value) if by_step else _concatenated(reading.name, value)
    count = _count(reading.name, parts)
    first = {"last": prompt - 1, "generated": prompt}.get(reading.positions, 0)
    positions = np.full(count, -1) if reading.reduced else np.arange(first, first + count)
    items = np.arange(count)
    if not reading.reduced:
        mask = filters.chosen(positions, length)
        if not mask.all():
            parts = {part: array[mask] for part, array in parts.items()}
            positions, items = positions[mask], items[mask]
    if not reading.several:
        one = reading.locations[0]
        return [Series(reading.name, reading.name, one, filters.parts(parts), positions, items)]
    series = []
    for index, location in enumerate(reading.locations):
        own = {part: array[:, index] for part, array in parts.items()}
        if filters != _KEEP_ALL:
            # A view would keep in memory what the filters leave out.
            own = {part: array.copy() for part, array in own.items()}
        tensor = f"{reading.name}.{location.label}"
        series.append(Series(tensor, reading.name, location, filters.parts(own), positions, items))
    return series


def _count(name: str, parts: Mapping[str, Array]) -> int:
    counts = {len(array) for array in parts.values()}
    if len(counts) > 1:
        raise NotAnArray(name, [])
    return counts.pop() if counts else 0


def _leaves(name: str, value: Any) -> dict[str, Array]:
    """A value's arrays by the names that they have in it, `""` for one that is an array itself."""
    import numpy as np

    if isinstance(value, Mapping):
        leaves = {}
        for key, item in value.items():
            if key == "token_strings":
                # Text, which repeats `token_ids`.
                continue
            leaves.update({f"{key}.{part}".rstrip("."): leaf for part, leaf in _leaves(name, item).items()})
        return leaves
    array = np.asarray(value)
    if array.dtype.kind in "OUSMm":
        raise NotAnArray(name, value)
    return {"": array}


def _stacked(name: str, value: Any) -> dict[str, Array]:
    """The items of a list as rows `[items, ...]`."""
    import numpy as np

    return _joined(name, value, lambda arrays: np.stack(arrays))


def _concatenated(name: str, value: Any) -> dict[str, Array]:
    """The rows of a list's items `[rows, ...]`, one after the other."""
    import numpy as np

    def join(arrays: list[Array]) -> Array:
        # A prompt that was computed in one step has one item.
        one = arrays[0]
        if len(arrays) > 1 or not one.ndim or _held(one) > 2 * one.nbytes:
            return np.concatenate(arrays)
        return one

    return _joined(name, value, join)


def _held(array: Array) -> int:
    """How many bytes an array keeps: those of the array or message that it is a part of."""
    import numpy as np

    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.nbytes if isinstance(base, np.ndarray) else memoryview(base).nbytes


def _joined(name: str, value: Any, join: Any) -> dict[str, Array]:
    items = [_leaves(name, item) for item in value]
    if not items:
        return {}
    if any(item.keys() != items[0].keys() for item in items):
        raise NotAnArray(name, value)
    try:
        return {part: join([item[part] for item in items]) for part in items[0]}
    except ValueError:
        raise NotAnArray(name, value) from None
