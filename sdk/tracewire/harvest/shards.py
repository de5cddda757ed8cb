"""The files of a shard: writes them from the rows of prompts, and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from tracewire.errors import NotAnArray
from tracewire_bus.wire.arrays import extra_dtypes

from .journal import Entry, Failed, File, Tensor, file_digest
from .libraries import library
from .pieces import Piece, size

if TYPE_CHECKING:
    import numpy as np

    from .rows import PromptRows, Series

    Array = np.ndarray[Any, Any]

__all__ = ["Files", "Shard", "decoded_tensors", "described_files", "part_name", "values_of_table"]

Files: TypeAlias = "dict[str, list[Piece]]"
"""Files by name, each as pieces of bytes, one after the other."""

#: The names of dtypes in safetensors' headers, by NumPy's names.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_COMPRESSION = "zstd"
_PROMPTS = ("prompt", "prompt_tokens", "text")
#: The columns of an index.
_INDEX = ("prompt", "name", "layer", "location", "position", "item", "token_id", "token", "shard", "tensor", "row")


def part_name(tensor: str, part: str) -> str:
    """The name of a part of a tensor in a file."""
    return f"{tensor}.{part}" if part else tensor


class Shard:
    """Prompts that go into one shard, while it fills.

    Attributes:
        nbytes: bytes of their values.
        tokens: tokens of their sequences.
    """

    def __init__(self) -> None:
        self._prompts: list[PromptRows] = []
        self._failed: list[Failed] = []
        self.nbytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._prompts) + len(self._failed)

    def add(self, one: PromptRows | Failed) -> None:
        """Add the outcome of a prompt."""
        if isinstance(one, Failed):
            self._failed.append(one)
            return
        self._prompts.append(one)
        self.nbytes += one.nbytes
        self.tokens += len(one.token_ids)

    def files(self, name: str, values: str) -> tuple[Entry, Files]:
        """The entry of the journal, without its number, and the files. `values` is the format."""
        entry, files = self.contents(name, values)
        entry.files = described_files(files)
        return entry, files

    def contents(self, name: str, values: str) -> tuple[Entry, Files]:
        """`files`, without the entry's list of them."""
        # Traces end in another order than the data set's.
        self._prompts.sort(key=attrgetter("row"))
        entry = Entry(0, shard=name, failed=self._failed, tokens=self.tokens, bytes=self.nbytes)
        entry.prompts = [one.key for one in self._prompts]
        entry.digests = [one.digest for one in self._prompts]
        if not self._prompts:
            return entry, {}
        tensors = self._tensors()
        arrays = _arrays(tensors)
        for series in tensors.values():
            first = series[0][1]
            for part in first.parts:
                parts = arrays[part_name(first.tensor, part)]
                entry.tensors[part_name(first.tensor, part)] = Tensor(
                    name=first.name,
                    dtype=parts[0].dtype.name,
                    shape=[sum(map(len, parts)), *parts[0].shape[1:]],
                    layer=first.location.layer,
                    location=first.location.name,
                    part=part,
                )
        index = self._index(name, tensors)
        files: Files = {}
        if values == "safetensors":
            files[f"shards/{name}.safetensors"] = _safetensors(entry, arrays)
        else:
            index = _with_values(index, tensors, arrays)
        files[f"shards/{name}.index.parquet"] = [_parquet(index)]
        files[f"shards/{name}.prompts.parquet"] = [_parquet(self._table())]
        return entry, files

    def _tensors(self) -> dict[str, list[tuple[int, Series]]]:
        """The rows of each tensor, with the number of the prompt among the shard's."""
        found: dict[str, list[tuple[int, Series]]] = {}
        for number, one in enumerate(self._prompts):
            for series in one.series:
                if len(series.positions):
                    found.setdefault(series.tensor, []).append((number, series))
        return found

    def _table(self) -> Any:
        pa = library("pyarrow")
        return pa.table(
            {
                "prompt": [one.key for one in self._prompts],
                "prompt_tokens": pa.array([one.prompt_tokens for one in self._prompts], pa.int32()),
                "token_ids": pa.array([one.token_ids for one in self._prompts], pa.list_(pa.int32())),
                "text": pa.array([one.text for one in self._prompts], pa.string()),
            }
        )

    def _index(self, name: str, tensors: dict[str, list[tuple[int, Series]]]) -> Any:
        """A table with a row for each row of each tensor."""
        import numpy as np

        pa = library("pyarrow")
        of = _Index(self._prompts)
        for number, series in enumerate(tensors.values()):
            of.add(number, series)
        firsts = [series[0][1] for series in tensors.values()]
        tensor = of.column("tensor", np.int32)
        prompt = of.column("prompt", np.int64)
        position = of.column("position", np.int64)
        unknown = position < 0
        columns: dict[str, Any] = {
            "prompt": pa.array([one.key for one in self._prompts]).take(pa.array(prompt)),
            "name": _coded(pa, [one.name for one in firsts], tensor),
            "layer": pa.array([one.location.layer for one in firsts], pa.int32()).take(pa.array(tensor)),
            "location": _coded(pa, [one.location.name or None for one in firsts], tensor),
            "position": pa.array(position.astype(np.int32), mask=unknown),
            "item": pa.array(of.column("item", np.int32)),
            "token_id": _masked(pa, of.column("token", np.int64), pa.int32()),
            "token": pa.array(of.strings, pa.string()),
            "shard": _coded(pa, [name], np.zeros(len(prompt), np.int32)),
            "tensor": _coded(pa, [one.tensor for one in firsts], tensor),
            "row": pa.array(of.column("row", np.int64)),
        }
        return pa.table(columns)


class _Index:
    """Columns of an index, tensor by tensor."""

    def __init__(self, prompts: list[PromptRows]) -> None:
        self._prompts = prompts
        self._columns: dict[str, list[Array]] = {}
        self.strings: list[str | None] = []

    def add(self, tensor: int, series: list[tuple[int, Series]]) -> None:
        """The rows of one tensor."""
        import numpy as np

        row = 0
        for number, one in series:
            prompt, count = self._prompts[number], len(one.positions)
            ids = np.asarray([*prompt.token_ids, -1], np.int64)
            # A position without a known token, as behind an image, gets the last entry, -1.
            known = np.where((one.positions >= 0) & (one.positions < len(ids) - 1), one.positions, len(ids) - 1)
            self._append("tensor", np.full(count, tensor))
            self._append("prompt", np.full(count, number))
            self._append("position", one.positions)
            self._append("item", one.items)
            self._append("token", ids[known])
            self._append("row", np.arange(row, row + count))
            strings = [*prompt.token_strings, None] if prompt.token_strings is not None else None
            usable = strings is not None and len(strings) == len(ids)
            self.strings.extend(strings[at] if strings is not None and usable else None for at in known.tolist())
            row += count

    def column(self, name: str, dtype: Any) -> Array:
        """All of a column."""
        import numpy as np

        parts = self._columns.get(name, [])
        return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)

    def _append(self, name: str, values: Array) -> None:
        self._columns.setdefault(name, []).append(values)


def _coded(pa: Any, values: list[Any], codes: Array) -> Any:
    """A column with few different texts. `None` among them is null."""
    import numpy as np

    nulls = np.asarray([value is None for value in values], bool)
    texts = pa.array([value or "" for value in values], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=nulls[codes] if len(values) else None), texts)


def _masked(pa: Any, values: Array, kind: Any) -> Any:
    return pa.array(values, mask=values < 0).cast(kind)


def described_files(files: Files) -> list[File]:
    """The files, as an entry of the journal lists them."""
    return [File(file, sum(map(size, pieces)), file_digest(*pieces)) for file, pieces in files.items()]


def _arrays(tensors: dict[str, list[tuple[int, Series]]]) -> dict[str, list[Array]]:
    """The tensors, part by part, each as the rows of its prompts: arrays of one dtype, whose rows have one shape."""
    return {
        part_name(tensor, part): [one.parts[part] for _, one in series]
        for tensor, series in tensors.items()
        for part in series[0][1].parts
    }


def _safetensors(entry: Entry, arrays: dict[str, list[Array]]) -> list[Piece]:
    """A safetensors file. The values are not copied, since copying them takes as long as writing them.

    The form: the size of the header, the header in JSON, and the tensors' bytes, those with the largest elements first.
    """
    described = {name: {"name": one.name, "layer": one.layer, "part": one.part} for name, one in entry.tensors.items()}
    metadata = {"tracewire": json.dumps({"shard": entry.shard, "tensors": described})}
    if any(one.dtype not in _NAMES for one in entry.tensors.values()):
        # The library knows more dtypes, and refuses the others.
        whole = {name: _concatenated(parts) for name, parts in arrays.items()}
        return [library("safetensors.numpy").save(whole, metadata=metadata)]
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces: list[Piece] = []
    offset = 0
    for name in sorted(arrays, key=lambda name: (-arrays[name][0].dtype.itemsize, name)):
        began = offset
        for array in arrays[name]:
            pieces.append(array)
            offset += array.nbytes
        one = entry.tensors[name]
        header[name] = {"dtype": _NAMES[one.dtype], "shape": one.shape, "data_offsets": [began, offset]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return [len(encoded).to_bytes(8, "little"), encoded, *pieces]


def _concatenated(parts: list[Array]) -> Array:
    import numpy as np

    return np.concatenate(parts)


def decoded_tensors(data: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file, in their own dtypes. safetensors' own reader for NumPy has no bfloat16."""
    import numpy as np

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    more = extra_dtypes()
    tensors = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES[one["dtype"]]
        start, stop = (8 + length + offset for offset in one["data_offsets"])
        flat = np.frombuffer(data[start:stop], more.get(dtype) or np.dtype(dtype))
        tensors[name] = flat.reshape(one["shape"])
    return tensors


def _with_values(index: Any, tensors: dict[str, list[tuple[int, Series]]], arrays: dict[str, list[Array]]) -> Any:
    """The index with a column of values for each name that parts have."""
    pa = library("pyarrow")
    columns = dict.fromkeys(_column(part) for series in tensors.values() for part in series[0][1].parts)
    for column in columns:
        index = index.append_column(column, _lists(pa, column, tensors, arrays))
    return index


def _column(part: str) -> str:
    """The column with a part's values: `values` for a tensor without parts."""
    name = part or "values"
    return f"{name}_values" if name in _INDEX else name


def _lists(pa: Any, column: str, tensors: dict[str, list[tuple[int, Series]]], arrays: dict[str, list[Array]]) -> Any:
    """A column of lists: the values of each row, flat, and null in rows of tensors that have none in it."""
    import numpy as np

    flat, widths, missing = [], [], []
    for tensor, series in tensors.items():
        rows = sum(len(one.positions) for _, one in series)
        found = next((arrays[part_name(tensor, part)] for part in series[0][1].parts if _column(part) == column), None)
        missing.append(np.full(rows, found is None))
        if found is None:
            widths.append(np.zeros(rows, np.int64))
            continue
        array = _concatenated(found)
        if array.dtype.kind not in "fbiu":
            # bfloat16 and the 8-bit floats, which Parquet lacks.
            array = array.astype(np.float32)
        flat.append(array.reshape(-1))
        widths.append(np.full(rows, array[0].size))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(widths))])
    mask = pa.array(np.concatenate(missing))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(np.concatenate(flat)), mask=mask)


def values_of_table(table: Any, entry: Entry) -> dict[str, Array]:
    """The tensors of a Parquet file that has values beside its index."""
    import numpy as np

    names = np.asarray(table.column("tensor").to_pylist())
    more = extra_dtypes()
    tensors = {}
    for name, one in entry.tensors.items():
        tensor = name.removesuffix(f".{one.part}") if one.part else name
        (rows,) = np.nonzero(names == tensor)
        lists = table.column(_column(one.part)).combine_chunks().take(rows)
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        tensors[name] = flat.astype(more.get(one.dtype) or np.dtype(one.dtype), copy=False).reshape(one.shape)
    return tensors


def _parquet(table: Any) -> bytes:
    pa, parquet = library("pyarrow"), library("pyarrow.parquet")
    sink = pa.BufferOutputStream()
    # Values hardly repeat, so compression costs more than it saves.
    small = [name for name in table.column_names if name in _INDEX or name in _PROMPTS]
    compression = dict.fromkeys(small, _COMPRESSION)
    parquet.write_table(table, sink, use_dictionary=small, compression=compression)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def signature(one: PromptRows) -> Iterator[tuple[str, Any]]:
    """The dtype and the shape of a row of each tensor of a prompt that has rows."""
    for series in one.series:
        if len(series.positions):
            yield series.tensor, {part: (array.dtype.name, array.shape[1:]) for part, array in series.parts.items()}


class Signatures:
    """The dtype and the shape of each tensor's rows, which are the same in all prompts of a harvest."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def check(self, one: PromptRows) -> None:
        """Compare a prompt's rows with those of the prompts before.

        Raises:
            NotAnArray: they cannot be in one tensor.
        """
        for tensor, parts in signature(one):
            if self._known.setdefault(tensor, parts) != parts:
                raise NotAnArray(tensor, [])

    def learn(self, entries: Iterable[Entry]) -> None:
        """Take those of the shards that are there."""
        for entry in entries:
            for name, one in entry.tensors.items():
                tensor = name.removesuffix(f".{one.part}") if one.part else name
                self._known.setdefault(tensor, {})[one.part] = (one.dtype, tuple(one.shape[1:]))
