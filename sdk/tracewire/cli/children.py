"""The processes that `tracewire up` starts: each in a session of its own, with a log, and ended with the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from tracewire_bus.transport.embedded import die_with_parent

__all__ = ["Child"]

#: How often a wait looks at the process, in seconds.
_LOOK_S = 0.05
#: How much of a log an error shows, in characters.
_TAIL = 3000
#: A line of a log that says how a start gets on. A line that says when another attempt comes does not say why.
_NEWS = re.compile(r"\d%|\b(?:INFO|WARNING|ERROR)\b(?! Retrying)")
#: What stands before the words of a line: vLLM's process, the time, vLLM's level and place.
_BEFORE = re.compile(r"^(?:\([^)]* pid=\d+\) )?(?:\d{4}-\d\d-\d\d [\d:,.]+ )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] )?")


class Child:
    """A `tracewire` command as a process that says `ready NAME` on its standard output.

    Attributes:
        name: the subcommand.
        log: the file with the process's standard error; None if the process writes to the command's own.
        answer: the rest of the first line that begins with `ready`; `""` before that line.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        self.name = name
        self.log = log
        self.answer = ""
        errors = None if log is None else log.open("wb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tracewire.cli", name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                text=True,
                # A Ctrl-C at the terminal reaches the command alone, which ends its processes in order.
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        finally:
            if errors is not None:
                errors.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Read the output of the process to its end. A process whose output is not read would block."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "ready" and not self.answer:
                self.answer = rest

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; `None` while the process runs."""
        return self._process.poll()

    async def stop(self, grace_s: float) -> None:
        """Have the process end. If it does not within `grace_s` seconds, or the caller is cancelled, it is killed."""
        self._signal(signal.SIGTERM)
        try:
            with anyio.move_on_after(grace_s):
                # A look now and then: nothing else waits for the process.
                while self.status is None:  # noqa: ASYNC110
                    await anyio.sleep(_LOOK_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self.status is None:
                self._process.send_signal(number)

    def progress(self) -> str:
        """The last bar of progress or message in the log, such as that of a download; `""` if there is none."""
        lines = re.split(r"[\r\n]+", self.log_tail())
        found = next((line.strip() for line in reversed(lines) if _NEWS.search(line)), "")
        return _BEFORE.sub("", found)

    def log_tail(self) -> str:
        """The end of the log."""
        if self.log is None:
            return ""
        with suppress(OSError):
            return self.log.read_text(errors="replace")[-_TAIL:].strip()
        return ""
