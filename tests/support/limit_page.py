"""Writes the table of limits in docs/internals/untrusted-input.md anew: `python -m tests.support.limit_page`."""

from __future__ import annotations

from tests.support import ROOT
from tracewire_bus.domain.limit_table import documented

__all__ = ["PAGE", "written"]

PAGE = ROOT / "docs/internals/untrusted-input.md"
_BEGIN, _END = "<!-- limits -->\n", "<!-- end of limits -->"


def written(text: str) -> str:
    """The page with the table as the code has it."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + "\n" + "\n".join(documented()) + "\n\n" + _END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
