"""`Values`: saved values by name, with conversions to NumPy, torch, pandas and xarray.

These libraries are extras of the client. A conversion imports its library when it is first used.
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

    A conversion takes the name of one value, or no name for all values. It stacks lists: a list whose items are
    numbers, or arrays of one shape and dtype, becomes one array `[items, ...]`. A saved list mostly has one item for
    each step.
    A list of dicts with the same keys, as a `LogitLens` saves it, becomes a dict of such arrays. A list whose items
    differ in shape stays a list of arrays. Texts and None are not converted.

    The returned arrays are writable. A conversion copies arrays that are not, since those are parts of an event.

    Conversions download nothing. The engine sends a large array as a reference; call `await values.load()` before a
    conversion, so that the conversion works in both cases.
    """

    async def load(self, name: str | None = None, *, dtype: str | None = None, exact: bool = False) -> Any:
        """Download the references in one value, or in all values, one after the other. Returns the value, or a dict.

        The returned arrays have the dtype `dtype` (`"float32"`), if one is given. Otherwise arrays of bfloat16 and of
        8-bit floats become float32, in which NumPy can compute, and other arrays keep their dtype; with `exact`, all
        keep it. Downloaded arrays replace their references in this dict, so that they are downloaded once.

        Raises:
            ValueMissing: a reference's array has expired, or parts of it are missing.
            ValueError: `dtype` names no dtype, or is given together with `exact`.
            SaveMissing: nothing is saved under the name.
            BusUnavailable: Redis does not answer.
            ClientClosed: the client that read the reference is closed.
        """
        convert = as_dtype(dtype, exact=exact)
        for one in self if name is None else (name,):
            if holds_references(self[one]):
                # Replaces a value only: adding a key would break the iteration.
                self[one] = await fetched(self[one])
        return {one: convert(value) for one, value in self.items()} if name is None else convert(self[name])

    def to_numpy(self, name: str | None = None, *, dtype: str | None = None) -> Any:
        """Convert to writable NumPy arrays of `dtype`.

        The default is float32 for bfloat16 and 8-bit floats, and the saved dtype for others. `dtype="bfloat16"` keeps
        bfloat16, as a dtype of ml_dtypes.

        Raises:
            SaveMissing: nothing is saved under the name.
            NotLoaded: a reference in it has not been downloaded.
            ValueError: `dtype` names no dtype.
        """
        convert = as_dtype(dtype)
        return self._converted("to_numpy", name, lambda array: _writable(convert(array)))

    def to_torch(self, name: str | None = None, *, dtype: Any = None, device: Any = None) -> Any:
        """Convert to torch tensors of `dtype` on `device`: by default, of the saved dtype, on the CPU.

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
        """Convert one value to a table with a row for each item, or all saved lists to one table.

        - A list of numbers becomes a Series.
        - A list of arrays `[features]` becomes a DataFrame with a column for each feature. Arrays of more dimensions
          have a row for each index of all dimensions but the last.
        - A dict becomes a DataFrame with a column for each key.
        - Without a name, the DataFrame has a column for each saved list, with the list's items in the cells. Values
          that are not lists are left out.

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
        """Convert one value to a DataArray, or all values to a Dataset.

        The first dimension of a list is `step`, with the items' indices; the others are `NAME_1`, `NAME_2` and so on. A
        dict is a Dataset with a variable for each key, called `NAME.KEY`.

        Raises:
            LibraryMissing: xarray is not installed.
            SaveMissing: nothing is saved under the name.
            NotAnArray: a value is a text, or a list whose items differ in shape.
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
    """Import a library that is an extra of the client. `what` is the call that needs it, for the error.

    Raises:
        LibraryMissing: the library is not installed.
    """
    try:
        # By name, since type checkers and import checks must not require the extras.
        return import_module(name)
    except ImportError as error:
        raise LibraryMissing(what, name) from error


def _stacked(value: Any, what: str, name: str) -> Any:
    """`value` with NumPy arrays in place of arrays, numbers and lists of them: see `Values`."""
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
        # NumPy has no dtype for integers beyond 64 bits.
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
    # torch.from_numpy takes none of these types, so the bits pass as integers of the same size.
    bits: Any = f"uint{8 * array.dtype.itemsize}"
    return torch.from_numpy(array.view(bits)).view(getattr(torch, name))


# --- tables and labelled arrays ---------------------------------------------------------------------------------------


def _column(pandas: Any, value: Any) -> Any:
    """The items of a list as a column: numbers as the column's values, and arrays as its cells."""
    if isinstance(value, dict):
        # Each cell gets the dict of its item.
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
    """The index of a table with a row for each index of these dimensions; the first one is `step`."""
    names = ["step", *(f"dim_{axis}" for axis in range(1, len(shape)))]
    if len(shape) < 2:
        return pandas.RangeIndex(shape[0] if shape else 1, name="step")
    return pandas.MultiIndex.from_product([range(size) for size in shape], names=names)


def _labelled(xarray: Any, name: str, saved: Any, value: Any, variable: str | None = None) -> Any:
    """A DataArray of `value`, or a Dataset if it is a dict.

    `value` is the stacked form of `saved`. `name` names the dimensions, and `variable` (by default `name`) the result.
    """
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
