"""`Values`: what was saved, by name, and as arrays of NumPy and torch, as tables and as labelled arrays.

The libraries are extras of the client. A conversion imports its own on its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracewire.errors import LibraryMissing, NotAnArray, NotLoaded
from tracewire_bus.wire.arrays import array_of
from tracewire_bus.wire.kinds import is_array
from tracewire_bus.wire.refs import ArrayRef

from .large import as_dtype, fetched, holds_references

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Values", "library"]

_NUMBERS = frozenset({bool, int, float, complex})


class Values(dict[str, Any]):
    """Values by name: a dict with conversions.

    The conversions take the name of one value, or none for all of them. They put lists together: a list whose items are
    numbers, or arrays of one shape and dtype, becomes one array `[items, ...]`. The items of a save are mostly one a
    step. A list of dicts, as a `LogitLens` saves it, becomes a dict of such arrays. Lists whose items differ in shape
    stay lists of arrays, and text and None stay as they are.

    The arrays that a conversion returns are writable. It copies those that are not: what came in an event is a part of
    the event.

    A conversion downloads nothing. `await values.load()` before it makes it work whether a large array came in an event
    or as a reference, which is the engine's choice.
    """

    async def load(self, name: str | None = None, *, dtype: str | None = None, exact: bool = False) -> Any:
        """The value of this name, or a dict of all, with its references downloaded, one after the other.

        Arrays are of `dtype`, where one is given (`"float32"`). Otherwise those of bfloat16 and of the 8-bit floats
        become float32, which NumPy computes with, and the others keep theirs; with `exact` all do. What was downloaded
        takes the place of its reference here, so that nothing is downloaded twice.

        Raises:
            ValueMissing: a reference's array has expired, or is not whole any more.
            ValueError: `dtype` is the name of none.
            BusUnavailable: Redis does not answer.
            ClientClosed: the client that read the reference is closed.
        """
        convert = as_dtype(dtype, exact=exact)
        for one in self if name is None else (name,):
            if holds_references(self[one]):
                # No new key: iterating goes on.
                self[one] = await fetched(self[one])
        return {one: convert(value) for one, value in self.items()} if name is None else convert(self[name])

    def to_numpy(self, name: str | None = None, *, dtype: str | None = None) -> Any:
        """As writable NumPy arrays of `dtype`: by default float32 for bfloat16 and 8-bit floats, and the saved dtype
        for the others (`dtype="bfloat16"` keeps it, as one of ml_dtypes).

        Raises:
            SaveMissing: nothing is saved under the name.
            NotLoaded: a reference in it has not been downloaded.
            ValueError: `dtype` is the name of none.
        """
        convert = as_dtype(dtype)
        return self._converted("to_numpy", name, lambda array: _writable(convert(array)))

    def to_torch(self, name: str | None = None, *, dtype: Any = None, device: Any = None) -> Any:
        """As torch tensors of the saved dtype, bfloat16 included, on the CPU: or of `dtype`, on `device`.

        Raises:
            LibraryMissing: torch is not installed.
            SaveMissing: nothing is saved under the name.
            NotLoaded: a reference in it has not been downloaded.
        """
        torch = library("torch", "to_torch()")
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype

        def tensor(array: np.ndarray[Any, Any]) -> Any:
            made = _tensor(torch, _writable(array))
            return made if wanted is None and device is None else made.to(device=device, dtype=wanted)

        return self._converted("to_torch", name, tensor)

    def to_pandas(self, name: str | None = None) -> Any:
        """One value as a table with a row for each item, or a table of all saved lists.

        Numbers, one an item, make a Series. Arrays `[features]`, one an item, make a DataFrame with a column for each
        feature; arrays of more dimensions have a row for each index of all dimensions but the last. A dict makes a
        DataFrame with a column for each key. Without a name, the DataFrame has a column for each list, whose cells hold
        the list's items; values that are no lists are left out.

        Raises:
            LibraryMissing: pandas is not installed.
            SaveMissing: nothing is saved under the name.
            NotLoaded: a reference in it has not been downloaded.
        """
        pandas = library("pandas", "to_pandas()")
        if name is None:
            columns = {one: _column(pandas, self.to_numpy(one)) for one, value in self.items() if type(value) is list}
            return pandas.DataFrame(columns).rename_axis(index="step")
        return _table(pandas, name, self.to_numpy(name))

    def to_xarray(self, name: str | None = None) -> Any:
        """One value as a DataArray, or all of them as a Dataset.

        The first dimension of a list is `step`, with the items' indices; the others are `NAME_1`, `NAME_2` and so on. A
        dict is a Dataset with a variable for each key, called `NAME.KEY`.

        Raises:
            LibraryMissing: xarray is not installed.
            SaveMissing: nothing is saved under the name.
            NotAnArray: a value is none: text, or a list whose items differ in shape.
            NotLoaded: a reference in it has not been downloaded.
        """
        xarray = library("xarray", "to_xarray()")
        if name is not None:
            return _labelled(xarray, name, self[name], self.to_numpy(name))
        labelled = [_labelled(xarray, one, value, self.to_numpy(one)) for one, value in self.items()]
        return xarray.merge(labelled, join="outer", compat="no_conflicts")

    def _converted(self, what: str, name: str | None, leaf: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
        if name is not None:
            return _mapped(_stacked(self[name], what, name), leaf)
        return {one: _mapped(_stacked(value, what, one), leaf) for one, value in self.items()}


def library(name: str, what: str) -> Any:
    """A library that the client has as an extra, for `what`.

    Raises:
        LibraryMissing: it is not installed.
    """
    try:
        # By name: the client needs none of them.
        return import_module(name)
    except ImportError as error:
        raise LibraryMissing(what, name) from error


def _stacked(value: Any, what: str, name: str) -> Any:
    """`value` with NumPy arrays for its arrays, numbers and lists of them, as `Values` says."""
    import numpy as np

    if isinstance(value, ArrayRef):
        raise NotLoaded(name, what, value.nbytes)
    if is_array(value):
        return array_of(value)
    if type(value) in _NUMBERS:
        return np.asarray(value)
    if isinstance(value, Mapping):
        return {key: _stacked(item, what, name) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if value and all(type(item) in _NUMBERS for item in value):
        numbers = np.asarray(value)
        # Integers beyond 64 bits stay what they are.
        return numbers if numbers.dtype != object else list(value)
    return _joined([_stacked(item, what, name) for item in value])


def _joined(items: list[Any]) -> Any:
    import numpy as np

    if not items:
        return np.empty(0)
    first = items[0]
    if isinstance(first, dict) and all(isinstance(item, dict) and item.keys() == first.keys() for item in items):
        return {key: _joined([item[key] for item in items]) for key in first}
    if isinstance(first, np.ndarray) and all(
        isinstance(item, np.ndarray) and (item.shape, item.dtype) == (first.shape, first.dtype) for item in items
    ):
        return np.stack(items)
    return items


def _mapped(value: Any, leaf: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, leaf) for item in value]
    return leaf(value) if is_array(value) else value


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _tensor(torch: Any, array: np.ndarray[Any, Any]) -> Any:
    name = array.dtype.name
    if not name.startswith(("bfloat16", "float8")):
        return torch.from_numpy(array)
    if not hasattr(torch, name):
        return torch.from_numpy(array.astype("float32"))
    # NumPy and torch hand each other none of these types: their bits pass as integers of the same size.
    bits: Any = f"uint{8 * array.dtype.itemsize}"
    return torch.from_numpy(array.view(bits)).view(getattr(torch, name))


# --- tables and labelled arrays ---------------------------------------------------------------------------------------


def _column(pandas: Any, value: Any) -> Any:
    """The items of a list as a column: numbers as such, and arrays as cells."""
    if isinstance(value, dict):
        # Of each item its own dict.
        lengths = [len(part) for part in value.values()]
        value = [{key: part[index] for key, part in value.items()} for index in range(min(lengths, default=0))]
    if is_array(value) and value.ndim == 1:
        return pandas.Series(value)
    return pandas.Series(list(value), dtype=object)


def _table(pandas: Any, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        shapes = {getattr(part, "shape", None) for part in value.values()}
        if len(shapes) == 1 and None not in shapes:
            return pandas.DataFrame({key: _series(pandas, key, part) for key, part in value.items()})
        return pandas.DataFrame({key: _column(pandas, _at_least_1d(part)) for key, part in value.items()})
    if not is_array(value):
        return pandas.Series(_at_least_1d(value), name=name, dtype=object).rename_axis(index="step")
    if value.ndim < 2:
        return _series(pandas, name, value)
    return pandas.DataFrame(value.reshape(-1, value.shape[-1]), index=_index(pandas, value.shape[:-1]))


def _at_least_1d(value: Any) -> Any:
    return value if isinstance(value, list) or (is_array(value) and value.ndim) else [value]


def _series(pandas: Any, name: str, array: np.ndarray[Any, Any]) -> Any:
    return pandas.Series(array.reshape(-1), index=_index(pandas, array.shape), name=name)


def _index(pandas: Any, shape: tuple[int, ...]) -> Any:
    """A row for each index of these dimensions, of which the first is the steps'."""
    names = ["step", *(f"dim_{axis}" for axis in range(1, len(shape)))]
    if len(shape) < 2:
        return pandas.RangeIndex(shape[0] if shape else 1, name="step")
    return pandas.MultiIndex.from_product([range(size) for size in shape], names=names)


def _labelled(xarray: Any, name: str, saved: Any, value: Any, variable: str | None = None) -> Any:
    """`value`, which was made of `saved`, with dimensions that `name` names; called `variable`, or `name`."""
    variable = variable or name
    if isinstance(value, dict):
        parts = [_labelled(xarray, name, saved, part, f"{variable}.{key}") for key, part in value.items()]
        return xarray.merge(parts, compat="no_conflicts", join="outer")
    if not is_array(value):
        import numpy as np

        value = np.asarray(value) if not isinstance(value, list) or all(type(one) is str for one in value) else value
        if not is_array(value) or value.dtype == object:
            raise NotAnArray(variable, saved)
    steps = isinstance(saved, list) and value.ndim > 0
    dims = [f"{name}_{axis}" for axis in range(value.ndim)]
    if steps:
        dims[0] = "step"
    return xarray.DataArray(value, dims=dims, name=variable, coords={"step": range(value.shape[0])} if steps else {})
