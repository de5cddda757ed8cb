"""Commands on a real pseudo-terminal, whose screen a terminal emulator keeps."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import pexpect
import pyte

from tests.support import ROOT

__all__ = ["Terminal", "on_terminal", "path_of", "snapshot_of", "stable"]

#: How long a wait for the screen lasts, in seconds.
PATIENCE = 60
COLUMNS, LINES = 100, 30
SNAPSHOTS = ROOT / "tests" / "unit" / "tracewire" / "cli" / "snapshots"


class Terminal:
    """A command on a terminal of 100 columns and 30 lines."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "tracewire.cli", *arguments],
            dimensions=(LINES, COLUMNS),
            env={
                # pytest sets these where it runs several workers.
                **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TERM": "xterm-256color",
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
            cwd=str(ROOT),
            timeout=PATIENCE,
        )
        self.ended = False

    def text(self) -> str:
        """What the screen shows, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.screen.display).strip("\n")

    def press(self, keys: str) -> None:
        """Send what a terminal sends for keys."""
        self.process.send(keys)

    async def wait(self, shown: str | Callable[[str], bool]) -> str:
        """Wait until the screen shows a text, or fits, and return what it shows."""
        fits = shown if callable(shown) else lambda text: shown in text
        await anyio.to_thread.run_sync(self._read_until, fits, str(shown))
        return self.text()

    async def wait_end(self) -> int:
        """Wait until the command has ended, and return its exit status."""
        await anyio.to_thread.run_sync(self._read_until, lambda text: self.ended, "the end")
        self.process.wait()
        return int(self.process.exitstatus if self.process.exitstatus is not None else -self.process.signalstatus)

    def _read_until(self, fits: Callable[[str], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not fits(self.text()):
            if self.ended or time.monotonic() > until:
                raise AssertionError(f"the screen did not come to show {what!r}; it shows:\n{self.text()}")
            try:
                self._stream.feed(self.process.read_nonblocking(65536, timeout=0.2))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                self.ended = True


@contextmanager
def on_terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """A command on a terminal, which is ended with the context."""
    terminal = Terminal(arguments, environment)
    try:
        yield terminal
    finally:
        terminal.process.close(force=True)


def snapshot_of(name: str, text: str) -> tuple[str, str]:
    """The text as `stable` has it, and the snapshot of this name.

    With `UPDATE_SNAPSHOTS=1` in the environment the snapshot is written first.
    """
    text = stable(text)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        path_of(name).write_text(text)
    return text, path_of(name).read_text()


def path_of(name: str) -> Path:
    """The file of a snapshot."""
    return SNAPSHOTS / f"{name}.txt"


def stable(text: str) -> str:
    """What a terminal shows, with the numbers replaced that differ from run to run."""
    text = re.sub(r"\b[0-9a-f]{32}\b", "TRACE", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "TRACE       ", text)
    text = re.sub(r"\d+\.\d tokens/s", "N tokens/s", text)
    text = re.sub(r"(unix|redis)://\S+", "URL", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
