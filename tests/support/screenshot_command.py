"""The command line of the programs that write the screenshots of the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
from playwright.async_api import expect

from tests.support import ROOT

__all__ = ["write"]


def write(
    run: Callable[[Path], Awaitable[Any]], description: str | None, arguments: Sequence[str] | None, missing: str = ""
) -> int:
    """Have `run` write screenshots to the folder that the arguments name. `missing` says what this machine lacks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "screenshots", help="folder to write to")
    to = parser.parse_args(arguments).to
    if missing:
        parser.error(missing)
    to.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=60_000)
    anyio.run(run, to)
    return 0
