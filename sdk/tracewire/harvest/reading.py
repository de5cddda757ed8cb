"""Reading a harvest: prompt by prompt as NumPy arrays, or shard by shard. It blocks, and needs no client."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .journal import Entry, Journal, checked_file
from .libraries import library
from .shards import decoded_tensors, values_of_table
from .stores import Store

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["Harvested", "HarvestedPrompt", "open"]


@dataclass(frozen=True)
class HarvestedPrompt:
    """One prompt of a harvest.

    Attributes:
        key: its number in the data set, or its value in the column of keys.
        prompt_tokens: how many of `token_ids` are the prompt's; those after were sampled.
        token_ids: the tokens of its sequence.
        text: the text of the tokens that were sampled.
        arrays: its rows of each tensor, `[rows, ...]`.
        positions: the position of each of these rows in the sequence, int64 `[rows]`; -1 if it is unknown.
    """

    key: int | str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    arrays: dict[str, Array] = field(default_factory=dict, repr=False)
    positions: dict[str, Array] = field(default_factory=dict, repr=False)

    def __getitem__(self, tensor: str) -> Array:
        """The rows of one tensor: `prompt["hs.3"]`."""
        return self.arrays[tensor]


class _Loaded:
    """A shard that was read: its tensors, its index as columns, and its prompts."""

    def __init__(self, store: Store, entry: Entry, exact: bool) -> None:
        import numpy as np

        parquet = library("pyarrow.parquet", "reading a harvest")
        files = {file.name.partition(".")[2]: checked_file(store, entry, file) for file in entry.files}
        self.index = parquet.read_table(io.BytesIO(files["index.parquet"]))
        self.prompts = parquet.read_table(io.BytesIO(files["prompts.parquet"]))
        data = files.get("safetensors")
        tensors = values_of_table(self.index, entry) if data is None else decoded_tensors(data)
        self.tensors = tensors if exact else {name: _usable(array) for name, array in tensors.items()}
        #: By tensor: for each of its rows, the number of the row's prompt in the shard, and the row's position.
        self._rows: dict[str, tuple[Array, Array]] = {}
        numbers = {key: number for number, key in enumerate(entry.prompts)}
        tensor = self.index.column("tensor").combine_chunks().dictionary_encode()
        names, codes = tensor.dictionary.to_pylist(), tensor.indices.to_numpy()
        prompts = np.asarray([numbers[key] for key in self.index.column("prompt").to_pylist()], np.int64)
        positions = self.index.column("position").fill_null(-1).to_numpy().astype(np.int64)
        for code, name in enumerate(names):
            mask = codes == code
            self._rows[name] = prompts[mask], positions[mask]
        self._entry = entry
        self._numbers = numbers

    def prompt(self, key: int | str) -> HarvestedPrompt:
        import numpy as np

        number = self._numbers[key]
        row = self.prompts.slice(number, 1).to_pylist()[0]
        found = HarvestedPrompt(key, row["prompt_tokens"], row["token_ids"], row["text"])
        for name, one in self._entry.tensors.items():
            prompts, positions = self._rows[name.removesuffix(f".{one.part}") if one.part else name]
            start, stop = np.searchsorted(prompts, [number, number + 1])
            found.arrays[name] = self.tensors[name][start:stop]
            found.positions[name] = positions[start:stop]
        return found


def _usable(array: Array) -> Array:
    """The array in a dtype with which NumPy can compute: bfloat16 and float8 become float32."""
    return array.astype("float32") if array.dtype.name.startswith(("bfloat16", "float8")) else array


class Harvested:
    """A harvest that is read.

        for prompt in tracewire.harvest.open("acts"):
            prompt.key, prompt.token_ids, prompt["hs.3"]

    Iterating yields its prompts, shard by shard, with one shard in memory. `harvested[key]` is one of them. The
    bytes of each shard are compared with their digests as it is read.

    Attributes:
        description: what was harvested: `model`, `revision`, `interventions` and so on.
        failed: the prompts whose traces failed, with the error's text, by key.
    """

    def __init__(self, store: Store, exact: bool) -> None:
        self._store = store
        self._exact = exact
        journal = Journal(store)
        journal.read()
        self.description: Mapping[str, Any] = journal.head
        self.failed = {key: f"{one.type}: {one.message}" for key, one in journal.failed.items()}
        self._entries = list(journal)
        self._shard_of = {key: entry for entry in self._entries for key in entry.prompts}
        self._last: tuple[int, _Loaded] | None = None

    def __len__(self) -> int:
        return len(self._shard_of)

    def __contains__(self, key: object) -> bool:
        return key in self._shard_of

    def keys(self) -> list[int | str]:
        """The prompts' keys, shard by shard."""
        return list(self._shard_of)

    def __iter__(self) -> Iterator[HarvestedPrompt]:
        for entry in self._entries:
            shard = self._load(entry)
            for key in entry.prompts:
                yield shard.prompt(key)

    def __getitem__(self, key: int | str) -> HarvestedPrompt:
        """One prompt, by its key. Reads its shard, unless that was the last one read.

        Raises:
            KeyError: the harvest has no such prompt.
            ShardDamaged: its shard is not what was written.
        """
        return self._load(self._shard_of[key]).prompt(key)

    @property
    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """The dtype and the shape of a row of each tensor, by name."""
        return {name: (one.dtype, one.shape[1:]) for entry in self._entries for name, one in entry.tensors.items()}

    @property
    def locations(self) -> dict[str, str]:
        """The location that each tensor is of, by name: `"residual(3)"`."""
        return {name: one.location for entry in self._entries for name, one in entry.tensors.items()}

    def shards(self) -> Iterator[tuple[Any, dict[str, Array]]]:
        """Each shard as its index, a table of pyarrow, and its tensors `[rows, ...]` by name.

        A row of the index gives the prompt, layer, position and token of row `row` of tensor `tensor`.

        Raises:
            ShardDamaged: a shard is not what was written.
        """
        for entry in self._entries:
            shard = self._load(entry)
            yield shard.index, shard.tensors

    def _load(self, entry: Entry) -> _Loaded:
        if self._last is None or self._last[0] != entry.number:
            self._last = None
            self._last = entry.number, _Loaded(self._store, entry, self._exact)
        return self._last[1]

    def __repr__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"<Harvested {self._store.url}: {len(self)} prompts in {len(self._entries)} shards{failed}>"


def open(
    to: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, exact: bool = False
) -> Harvested:
    """The harvest at a folder or a URL, as far as it is written now.

    Arrays of bfloat16 and of the 8-bit floats become float32, which NumPy computes with; with `exact` they stay as they
    are. `storage_options` go to fsspec.

    Raises:
        HarvestMissing: there is none.
        HarvestConflict: a newer version of Tracewire wrote it.
        ShardDamaged: its journal is cut short.
        LibraryMissing: the extra `tracewire[harvest]` is not installed.
        StoreRefused: the store refuses the credentials.
        StoreUnavailable: the store does not answer.
    """
    return Harvested(Store(to, storage_options), exact)
