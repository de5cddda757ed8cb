"""How commands print: tables on a terminal, columns with tabs elsewhere, JSON on request, and remarks on stderr."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, Final

from tracewire_bus.transport.urls import redacted

__all__ = [
    "PREFIX",
    "engineless",
    "no_engines",
    "place",
    "print_any_character",
    "print_json",
    "print_json_line",
    "print_matrix",
    "print_rows",
    "remark",
    "rich_terminal",
    "start_command",
]

#: The prefix of the keys on Redis, by default.
PREFIX: Final = "tw"


def rich_terminal() -> bool:
    """Whether standard output is a terminal and rich is installed (`tracewire[cli]`)."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def print_any_character() -> None:
    """Have output that is not UTF-8 replace the characters that it lacks: a model's text can have any character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_utf8(stream):
            stream.reconfigure(errors="replace")


def _is_utf8(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, ensure_ascii=not _is_utf8(sys.stdout), indent=2), flush=True)


def print_json_line(value: Any) -> None:
    """Print a value as JSON on one line, for a stream of them."""
    print(json.dumps(value, ensure_ascii=not _is_utf8(sys.stdout), separators=(",", ":")), flush=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows: as a table with a header on a terminal, else with tabs between their columns and without a header.

    A table leaves out the last columns where all rows are empty there.
    """
    texts = [[str(value) for value in row] for row in rows]
    if not texts:
        return
    if not rich_terminal():
        for row in texts:
            print("\t".join(row).rstrip())
        return
    # Imported here: other commands do not need it, and it takes a tenth of a second.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    filled = max(number for row in texts for number, value in enumerate(row, 1) if value or number == 1)
    for name in columns[:filled]:
        table.add_column(name, overflow="fold")
    for row in texts:
        table.add_row(*(Text(value) for value in row[:filled]))
    Console().print(table)


def print_matrix(corner: str, rows: Sequence[str], columns: Sequence[str], values: Any) -> None:
    """Print numbers `[rows, columns]` with the names of both: as a heat map on a terminal, else with tabs between.

    Where the numbers of a row do not fit into a line of the terminal, the map has colours only.
    """
    if not rich_terminal():
        print("\t".join([corner, *columns]))
        for name, numbers in zip(rows, values, strict=True):
            print("\t".join([name, *(f"{number:.4g}" for number in numbers)]))
        return
    from rich.console import Console
    from rich.text import Text

    texts = [[f"{number:.2f}" for number in numbers] for numbers in values]
    cell = max(len(text) for line in (columns, *texts) for text in line) + 1
    margin = max(map(len, (corner, *rows))) + 1
    console = Console()
    if margin + cell * len(columns) > console.width:
        cell, texts = max(map(len, columns)) + 1, [[""] * len(columns) for _ in rows]
    greatest = max((abs(float(number)) for numbers in values for number in numbers), default=0.0) or 1.0
    console.print(Text(corner.ljust(margin) + "".join(name.rjust(cell) for name in columns), "bold"), soft_wrap=True)
    for name, line, numbers in zip(rows, texts, values, strict=True):
        shown = Text(name.ljust(margin))
        for text, number in zip(line, numbers, strict=True):
            shown.append(text.rjust(cell), _heat(number / greatest))
        console.print(shown, soft_wrap=True)


def _heat(part: float) -> str:
    """The style of a number from -1, which is blue, to 1, which is red. 0 is white."""
    pale = round(255 - 185 * min(1.0, abs(part)))
    red, blue = (255, pale) if part >= 0 else (pale, 255)
    return f"rgb(0,0,0) on rgb({red},{pale},{blue})"


def remark(text: str) -> None:
    """Print a remark for the user on standard error, where it does not mix with data."""
    print(text, file=sys.stderr, flush=True)


def place(url: str, prefix: str) -> str:
    """Where a command has looked: the Redis, without a password, and the prefix of the keys."""
    return f"{redacted(url)} with the prefix {prefix!r}"


def start_command(url: str, prefix: str, model: str | None = None) -> str:
    """The command that starts an engine of a model there."""
    more = f" --prefix {shlex.quote(prefix)}" if prefix != PREFIX else ""
    return f"tracewire engine {model or 'demo'} --url {redacted(url)}{more}"


def engineless(url: str, prefix: str, model: str | None = None, served: Sequence[str] = ()) -> str:
    """What to say where no engine serves `model`: which models are served, and how to start an engine."""
    text = f"No engines{f' of {model!r}' if model else ''} on {place(url, prefix)}"
    text += f"; served now: {', '.join(map(repr, served))}" if served else ""
    if model and (near := get_close_matches(model, served, 1)):
        return f"{text}; did you mean {near[0]!r}?"
    return f"{text}. Start one: {start_command(url, prefix, model)}"


def no_engines(url: str, prefix: str, model: str | None = None, served: Sequence[str] = ()) -> None:
    """Say that no engine serves, as `engineless` has it."""
    remark(engineless(url, prefix, model, served))
