"""Processes of a benchmark's own, how it takes its options and prints what it found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -m module arguments`, which has printed a first line: it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return number


def show(figures: Mapping[str, Any], *, as_json: bool, width: int = 12) -> None:
    """Print figures a line each; with `as_json` as one object, the last line, and the lines on standard error."""
    for name, value in figures.items():
        print(f"{name:{width}} {value}", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(figures))
