"""How commands print: tables on a terminal, columns with tabs elsewhere, JSON on request, and remarks on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from tracewire_bus.transport.urls import redacted

__all__ = ["no_engines", "print_json", "print_json_line", "print_rows", "remark", "rich_terminal"]


def rich_terminal() -> bool:
    """Whether standard output is a terminal and rich is installed (`tracewire[cli]`)."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, ensure_ascii=False, indent=2), flush=True)


def print_json_line(value: Any) -> None:
    """Print a value as JSON on one line, for a stream of them."""
    print(json.dumps(value, ensure_ascii=False, separators=(",", ":")), flush=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows: as a table with a header on a terminal, else with tabs between their columns and without a header."""
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
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in texts:
        table.add_row(*(Text(value) for value in row))
    Console().print(table)


def remark(text: str) -> None:
    """Print a remark for the user on standard error, where it does not mix with data."""
    print(text, file=sys.stderr, flush=True)


def no_engines(url: str, model: str | None = None) -> None:
    """Say that no engine serves, and how to start one."""
    what = f"No engines of {model!r}" if model else "No engines"
    remark(f"{what} on {redacted(url)}. Start one: tracewire engine {model or 'demo'} --url {redacted(url)}")
