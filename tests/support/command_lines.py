"""Command lines of processes that may end at any moment."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def command_line(process: psutil.Process) -> str:
    """The name of a process and its arguments; empty for one that has ended."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.NoSuchProcess:
        return ""


def with_words(processes: Iterable[psutil.Process], words: str) -> list[psutil.Process]:
    """The processes with these words in their name or command line."""
    return [process for process in processes if words in command_line(process)]
