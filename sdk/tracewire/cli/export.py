"""`tracewire export`: a trace as a file: its events as JSON lines, or its saves as safetensors or Parquet."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from tracewire.client import Client, connect
from tracewire.errors import LibraryMissing
from tracewire.traces.output import Output, Shared
from tracewire.traces.state import Choice, State
from tracewire_bus.wire.kinds import is_array

from .commands import UsageError, add_command, nearest
from .printing import print_json, remark

__all__ = ["FORMATS", "add_export", "tensors_of"]

#: The formats by the ends of files' names.
FORMATS = {".jsonl": "jsonl", ".safetensors": "safetensors", ".parquet": "parquet"}


def add_export(commands: Any, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    export = add_command(
        commands,
        "export",
        _export,
        parents=parents,
        help="write a trace to a file: its events as JSON lines, or its saves as safetensors or Parquet",
        exits={0: "the file is written", 1: "an error, or a save that the format cannot hold"},
        examples=("tracewire export TRACE --to trace.jsonl", "tracewire export TRACE --to saves.safetensors"),
        json="an object: file, format, tokens, saves (with --to)",
    )
    export.add_argument("trace", metavar="TRACE", help="the trace's id")
    what = (
        "the file; its end gives the format: .jsonl, .safetensors or .parquet (default: JSON lines on standard output)"
    )
    export.add_argument("--to", type=Path, metavar="FILE", help=what)
    export.add_argument("--format", choices=sorted(FORMATS.values()), help="the format, whatever the file's name")
    export.add_argument("--names", nargs="+", metavar="NAME", help="only these saved names")


async def _export(options: argparse.Namespace) -> int:
    format_ = options.format or ("jsonl" if options.to is None else FORMATS.get(options.to.suffix))
    if format_ is None:
        raise UsageError(f"--to: expected a file that ends with {', '.join(FORMATS)}, or --format; got {options.to}")
    if options.to is None and (format_ != "jsonl" or options.json):
        raise UsageError("give --to FILE: standard output takes JSON lines only")
    async with connect(options.url, prefix=options.prefix) as client:
        if format_ == "jsonl":
            tokens, saves = await _write_lines(client, options)
        else:
            state = await client.get_state(options.trace)
            if not state.finished:
                remark(f"tracewire: trace {options.trace} still runs: the file has it up to {state.position}")
            choices = [choice for invoke in state.invokes for choice in invoke.choices]
            for choice in choices:
                await choice.saves.load()
            _check_names(options.names, choices)
            tokens, saves = _WRITERS[format_](options.to, state, choices, options.names)
    if options.json:
        print_json({"file": str(options.to), "format": format_, "tokens": tokens, "saves": saves})
    elif options.to is not None:
        print(f"{options.to}: {tokens} tokens, saves {', '.join(saves) or 'none'}")
    return 0


def _check_names(names: Sequence[str] | None, choices: Sequence[Choice]) -> None:
    """Refuse a name that the trace has not saved.

    Raises:
        UsageError: in that case.
    """
    saved = {str(name) for choice in choices for name in choice.saves}
    for name in names or ():
        if name not in saved:
            there = ", ".join(sorted(saved)) or "none"
            raise UsageError(f"--names: the trace has no save {name!r} (it has {there}){nearest(name, saved)}")


async def _write_lines(client: Client, options: argparse.Namespace) -> tuple[int, list[str]]:
    # Imported here: other formats do not need it.
    from tracewire.gateway.event_json import event_json

    tokens, saves = 0, dict[str, None]()
    with _file(options.to) as file:
        async for event in client.subscribe(options.trace, names=options.names):
            if isinstance(event, Output | Shared):
                tokens += len(event.token_ids)
                saves.update(dict.fromkeys(event.delta))
            line = json.dumps(event_json(event, "list", options.trace), ensure_ascii=False, separators=(",", ":"))
            file.write(line + "\n")
    return tokens, list(saves)


@contextlib.contextmanager
def _file(path: Path | None) -> Iterator[TextIO]:
    """A text file that has its name once it is whole; standard output without a path."""
    if path is None:
        yield sys.stdout
        return
    with _whole(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end: a file that is there is never a part of one.

    Raises:
        UsageError: no file can be made there.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise UsageError(f"--to: {path}: {error.strerror}") from None
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def tensors_of(choices: Sequence[Choice], names: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saves of a trace as arrays by name, and those that are none, as plain values.

    A list of arrays of one shape, or of numbers, is one array `[items, ...]`; other lists have an array `NAME.0`,
    `NAME.1`, ... for each item. Dicts have `NAME.KEY`. With several choices each name begins with `INVOKE.CHOICE.`.
    """
    arrays: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for choice in choices:
        before = f"{choice.invoke}.{choice.choice}." if len(choices) > 1 else ""
        for name, value in choice.saves.items():
            if names is None or name in names:
                _collect(before + str(name), value, arrays, rest)
    return arrays, rest


def _collect(name: str, value: Any, arrays: dict[str, Any], rest: dict[str, Any]) -> None:
    import numpy as np

    if is_array(value):
        arrays[name] = np.asarray(value)
    elif isinstance(value, bool | str) or value is None:
        rest[name] = value
    elif isinstance(value, int | float):
        arrays[name] = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}.{key}", item, arrays, rest)
    elif isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        arrays[name] = np.asarray(value, np.float32 if any(isinstance(one, float) for one in value) else np.int64)
    elif isinstance(value, list) and value and all(is_array(one) for one in value):
        shapes = {(tuple(one.shape), str(one.dtype)) for one in value}
        if len(shapes) == 1:
            arrays[name] = np.stack([np.asarray(one) for one in value])
        else:
            arrays.update({f"{name}.{number}": np.asarray(one) for number, one in enumerate(value)})
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        for key in dict.fromkeys(key for one in value for key in one):
            _collect(f"{name}.{key}", [one[key] for one in value if key in one], arrays, rest)
    else:
        rest[name] = value


def _write_safetensors(
    path: Path, state: State, choices: Sequence[Choice], names: Sequence[str] | None
) -> tuple[int, list[str]]:
    import numpy as np

    save_file = _library("safetensors.numpy").save_file
    arrays, rest = tensors_of(choices, names)
    for name in rest:
        remark(f"tracewire: {name} holds no numbers, and is left out: JSON lines hold it")
    for choice in choices:
        before = f"{choice.invoke}.{choice.choice}." if len(choices) > 1 else ""
        arrays[f"{before}token_ids"] = np.asarray(choice.token_ids, np.int64)
    metadata = {"trace_id": state.trace_id, "status": state.status or "running", "position": state.position}
    if len(choices) == 1:
        metadata["text"] = choices[0].text
    with _whole(path) as temporary:
        save_file({name: np.ascontiguousarray(one) for name, one in arrays.items()}, temporary, metadata=metadata)
    return sum(len(choice.token_ids) for choice in choices), sorted(arrays)


def _write_parquet(
    path: Path, state: State, choices: Sequence[Choice], names: Sequence[str] | None
) -> tuple[int, list[str]]:
    """A row for each token, with a column for each saved list that has an item for each token."""
    arrow, parquet = _library("pyarrow"), _library("pyarrow.parquet")
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    for choice in choices:
        items = {
            str(name): value
            for name, value in choice.saves.items()
            if (names is None or name in names) and isinstance(value, list) and len(value) == len(choice.token_ids)
        }
        columns.update(dict.fromkeys(items))
        for name in choice.saves.keys() - items.keys():
            if names is None or name in names:
                remark(f"tracewire: {name} has no item for each token, and is left out: safetensors holds it")
        for index, token_id in enumerate(choice.token_ids):
            row: dict[str, Any] = {"invoke": choice.invoke, "choice": choice.choice, "index": index}
            row["token_id"] = token_id
            row["token"] = None if choice.token_strings is None else choice.token_strings[index]
            rows.append({**row, **{name: _cell(value[index]) for name, value in items.items()}})
    try:
        table = arrow.Table.from_pylist(rows)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise UsageError(f"Parquet cannot hold these saves: {error}; --names chooses some of them") from None
    about = {"trace_id": state.trace_id, "status": state.status or "running"}
    with _whole(path) as temporary:
        parquet.write_table(table.replace_schema_metadata(about), temporary)
    return len(rows), sorted(columns)


def _cell(value: Any) -> Any:
    if is_array(value):
        import numpy as np

        array = np.asarray(value)
        return (array.astype(np.float32) if array.dtype.name.startswith(("bfloat16", "float8")) else array).tolist()
    if isinstance(value, dict):
        return {str(key): _cell(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cell(item) for item in value]
    return value


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise LibraryMissing("tracewire export", name.partition(".")[0], "harvest") from error


_Writer = Callable[[Path, State, Sequence[Choice], Sequence[str] | None], tuple[int, list[str]]]
_WRITERS: dict[str, _Writer] = {"safetensors": _write_safetensors, "parquet": _write_parquet}
