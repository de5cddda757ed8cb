"""The prompts of a data set, one after the other: of an iterable, a JSONL or Parquet file, or a `datasets.Dataset`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import msgspec

from tracewire.checks import shown
from tracewire.errors import InvalidDataset
from tracewire.submission import Prompt

from .journal import digest
from .libraries import library

__all__ = ["Dataset", "Item"]

#: How many rows a thread reads ahead.
_BATCH = 256
#: The columns in which a prompt is looked for, in this order.
_COLUMNS = ("prompt", "text", "messages", "input_ids", "prompt_token_ids")
_FORMATS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")


@dataclass(frozen=True)
class Item:
    """A prompt of a data set: its row's number, its key, and a digest that tells it from other prompts."""

    row: int
    key: int | str
    prompt: Any
    digest: str


class Dataset:
    """The prompts of a data set, in any form that callers pass.

    `source` is a path or an fsspec URL of a JSONL or Parquet file, or an iterable or async iterable of rows: prompts as
    `Client.trace` takes them, or dicts, of which `column` is the prompt and `key` the key. Without `column` it is the
    first of `prompt`, `text`, `messages`, `input_ids` and `prompt_token_ids` that a row has; without `key` a prompt's
    key is its row's number. Iterating reads the source once.

    Attributes:
        total: how many rows it has, where that is known.

    Raises:
        TypeError: the source is none of these.
        ValueError: it is a file of another kind.
    """

    def __init__(
        self,
        source: Any,
        *,
        column: str | None = None,
        key: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._column = column
        self._key = key
        self._options = dict(storage_options or {})
        self.total: int | None = None
        self._rows = self._rows_of(source)

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Yields the prompts.

        Raises:
            InvalidDataset: a row is no prompt, or its key is none, or another row's.
        """
        seen: set[int | str] = set()
        kind: type | None = None
        row = 0
        async for one in self._rows:
            item = self._item(row, one)
            if self._key is not None:
                kind = kind or type(item.key)
                if type(item.key) is not kind:
                    raise InvalidDataset(
                        row, f"expected a key of type {kind.__name__}, as before, got {shown(item.key)}"
                    )
                if item.key in seen:
                    raise InvalidDataset(row, f"the key {item.key!r} is that of an earlier row")
                seen.add(item.key)
            row += 1
            if row % _BATCH == 0:
                # A source that never waits would block the event loop.
                await anyio.lowlevel.checkpoint()
            yield item

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rows_of(self, source: Any) -> AsyncIterator[Any]:
        if isinstance(source, str | os.PathLike):
            return self._file(os.fspath(source))
        if isinstance(source, bytes | Mapping | Prompt):
            raise TypeError(f"prompts: expected an iterable of prompts, or a file's path, got {shown(source)}")
        if isinstance(source, AsyncIterable):
            return aiter(source)
        if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
            raise TypeError(f"prompts: expected an iterable of prompts, or a file's path, got {shown(source)}")
        if hasattr(source, "__len__"):
            self.total = len(source)
        if type(source).__module__.partition(".")[0] == "datasets":
            # `datasets` reads files, and may download them.
            return _threaded(iter(source))
        return _plain(source)

    def _file(self, path: str) -> AsyncIterator[Any]:
        if not path.endswith(_FORMATS):
            raise ValueError(f"prompts: expected a file that ends with {', '.join(_FORMATS)}, got {path!r}")
        library("fsspec")
        if path.endswith(".parquet"):
            library("pyarrow.parquet")
            return _threaded(self._parquet(path))
        return _threaded(self._lines(path))

    def _lines(self, path: str) -> Iterator[Any]:
        fsspec = library("fsspec")
        try:
            with fsspec.open(path, "rb", compression="infer", **self._options) as file:
                for row, line in enumerate(line for line in file if line.strip()):
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise InvalidDataset(row, f"{path} has no JSON there: {error}") from None
        except (OSError, EOFError) as error:
            raise InvalidDataset(None, f"{path} cannot be read: {error}") from error

    def _parquet(self, path: str) -> Iterator[Any]:
        fsspec, parquet = library("fsspec"), library("pyarrow.parquet")
        arrow = library("pyarrow")
        try:
            with fsspec.open(path, "rb", **self._options) as file:
                table = parquet.ParquetFile(file)
                self.total = table.metadata.num_rows
                for batch in table.iter_batches(batch_size=_BATCH):
                    yield from batch.to_pylist()
        except (OSError, arrow.ArrowException) as error:
            raise InvalidDataset(None, f"{path} cannot be read: {error}") from error

    # --- items --------------------------------------------------------------------------------------------------------

    def _item(self, row: int, one: Any) -> Item:
        key: Any = row
        if self._key is not None:
            if not isinstance(one, Mapping) or self._key not in one:
                raise InvalidDataset(row, f"it has no column {self._key!r} to be its key{_columns(one)}")
            key = one[self._key]
            key = key.item() if hasattr(key, "item") else key
            if isinstance(key, bool) or not isinstance(key, int | str) or (isinstance(key, int) and abs(key) >= 2**63):
                raise InvalidDataset(row, f"expected an integer or a text as its key, got {shown(key)}")
        prompt = self._prompt(row, one)
        try:
            form = (prompt.prompt, prompt.sampling, prompt.edits) if isinstance(prompt, Prompt) else prompt
            encoded = msgspec.json.encode(form, enc_hook=_plain_form, order="deterministic")
        except (TypeError, ValueError) as error:
            raise InvalidDataset(row, f"expected a prompt, got {shown(prompt)}: {error}") from None
        return Item(row, key, prompt, digest(encoded))

    def _prompt(self, row: int, one: Any) -> Any:
        if not isinstance(one, Mapping):
            if self._column is not None:
                raise InvalidDataset(row, f"expected a dict with a column {self._column!r}, got {shown(one)}")
            return one
        if self._column is None and "multi_modal_data" in one:
            return {name: value for name, value in one.items() if name != self._key}
        names = _COLUMNS if self._column is None else (self._column,)
        name = next((name for name in names if name in one), None)
        if name is None:
            wanted = " or ".join(map(repr, names))
            raise InvalidDataset(row, f"it has no column {wanted} to be its prompt{_columns(one)}")
        if name == "input_ids" and "attention_mask" in one:
            return {"input_ids": one[name], "attention_mask": one["attention_mask"]}
        return one[name]


def _columns(one: Any) -> str:
    return f"; it has {', '.join(map(str, one))}" if isinstance(one, Mapping) else f", got {shown(one)}"


def _plain_form(value: Any) -> Any:
    """The stand-in, in a prompt's digest, for an array or another value that JSON has no form for."""
    if hasattr(value, "tobytes"):
        return [str(getattr(value, "shape", "")), digest(value.tobytes())]
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of a prompt's types")


async def _plain(rows: Iterable[Any]) -> AsyncIterator[Any]:
    for row in rows:
        yield row


async def _threaded(rows: Iterator[Any]) -> AsyncIterator[Any]:
    """Rows of an iterator that blocks, read in threads, some at a time."""

    def some() -> tuple[list[Any], Exception | None]:
        found: list[Any] = []
        try:
            found.extend(itertools.islice(rows, _BATCH))
        except Exception as error:
            return found, error
        return found, None

    while True:
        found, error = await anyio.to_thread.run_sync(some)
        for row in found:
            yield row
        if error is not None:
            raise error
        if not found:
            return
