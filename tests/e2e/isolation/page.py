"""Writes the verdicts of `tests.e2e.isolation.table --out FILE` into docs/isolation.md, as a table of kinds by outcome.

python -m tests.e2e.isolation.page inline FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT

__all__ = ["rows", "written"]

_PAGE = ROOT / "docs" / "isolation.md"

#: The outcomes, the best first, in the page's words.
OUTCOMES = {
    "contained": "the offender's own end; no other trace differs or waits",
    "unmet": "likewise, but the offender ends in another way than it should",
    "left": "no trace differs, but something stays behind in the process",
    "stalled": "no trace differs, but all wait, at most for the block's time in a step",
    "read": "no trace differs, but the offender saves what is not its own",
    "harmed": "other traces differ, or later ones",
    "restarted": "the engine's process ends, and the traces run again",
    "hung": "the engine hangs until it is ended",
}


def rows(verdicts: list[dict[str, Any]]) -> list[str]:
    """The lines of the table."""
    lines = ["| outcome | kinds | which |", "| --- | --- | --- |"]
    for outcome, words in OUTCOMES.items():
        names = [_named(one) for one in verdicts if one["outcome"] == outcome]
        if names:
            lines.append(f"| {words} | {len(names)} | {', '.join(names)} |")
    return lines


def _named(one: dict[str, Any]) -> str:
    left = f" ({', '.join(one['left'])})" if one["outcome"] == "left" else ""
    return f"`{one['name']}`{left}"


def written(page: str, mode: str, lines: list[str]) -> str:
    """The page's text with the table of a mode between its two marks.

    Raises:
        ValueError: the page has no such marks.
    """
    begin, end = f"<!-- {mode} -->", f"<!-- end of {mode} -->"
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {begin} and {end}")
    return "\n".join([head + begin, "", *lines, "", end + tail])


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.isolation.page", description=__doc__)
    parser.add_argument("mode", choices=("inline", "host"))
    parser.add_argument("file", type=Path, help="what `table --out` has written")
    options = parser.parse_args(arguments)
    verdicts = [json.loads(line) for line in options.file.read_text().splitlines()]
    _PAGE.write_text(written(_PAGE.read_text(), options.mode, rows(verdicts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
