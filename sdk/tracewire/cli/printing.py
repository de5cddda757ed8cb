"""How commands print: tables on a terminal, columns with tabs elsewhere, JSON on request, and remarks on stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from tracewire_bus.transport.urls import redacted

__all__ = [
    "no_engines",
    "print_any_character",
    "print_json",
    "print_json_line",
    "print_matrix",
    "print_rows",
    "remark",
    "rich_terminal",
]


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


def no_engines(url: str, model: str | None = None) -> None:
    """Say that no engine serves, and how to start one."""
    what = f"No engines of {model!r}" if model else "No engines"
    remark(f"{what} on {redacted(url)}. Start one: tracewire engine {model or 'demo'} --url {redacted(url)}")
