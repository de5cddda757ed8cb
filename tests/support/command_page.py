"""Writes the tables of docs/cli.md from the parsers, so that the page cannot fall behind.

python -m tests.support.command_page
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tracewire.cli.commands import EXITS, exits_of, subparsers_of
from tracewire.cli.main import build_parser

__all__ = ["PAGE", "page"]

PAGE = ROOT / "docs" / "cli.md"


def page(text: str) -> str:
    """The page's text with its tables as the parsers have them."""
    for name, table in (("commands", _commands()), ("exits", _exits())):
        begin, end = f"<!-- {name}: written by tests/support/command_page.py -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return text


def _commands() -> str:
    rows = ["| command | what it does | `--json` | exit statuses of its own |", "| --- | --- | --- | --- |"]
    for name, parser in subparsers_of(build_parser()).items():
        own = {number: meaning for number, meaning in exits_of(parser).items() if EXITS.get(number) != meaning}
        meanings = "; ".join(f"{number}: {meaning}" for number, meaning in sorted(own.items()))
        json = next((one.help or "" for one in parser._actions if "--json" in one.option_strings), "")
        what = (parser.description or "").rstrip(".")
        rows.append(f"| `tracewire {name}` | {what} | {json.removeprefix('print ')} | {meanings} |")
    return "\n".join(row.replace("|  |", "| |") for row in rows)


def _exits() -> str:
    rows = ["| exit status | meaning |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| {number} | {meaning} |" for number, meaning in EXITS.items())])


def main() -> int:
    """Write the page anew."""
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
