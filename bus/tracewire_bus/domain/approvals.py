"""The file of approved blocks, which `tracewire approve` writes and engines with `--code listed` read.

It is JSON: `{"approved": [{"hash", "name", "text", "by", "time"}]}`. `text` is what the operator has read
(`code_identity.described`), for the next comparison. Only hashes count for an engine.
"""

from __future__ import annotations

import difflib
import os
import time
from pathlib import Path

import msgspec

__all__ = ["Approval", "Approvals", "ApprovalsError"]


class ApprovalsError(ValueError):
    """The file of approved blocks cannot be read. The message names the file."""


class Approval(msgspec.Struct):
    """An approved block. `by` is the operator's user name, `time` is in seconds since the epoch."""

    hash: str
    name: str
    text: str = ""
    by: str = ""
    time: float = 0.0


class _File(msgspec.Struct):
    approved: list[Approval] = []


class Approvals:
    """The approved blocks of one file. `hashes` reads the file again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._file = _File()
        self._hashes: frozenset[str] = frozenset()

    def hashes(self) -> frozenset[str]:
        """The hashes of the approved blocks. A file that does not exist approves none.

        Raises:
            ApprovalsError: the file cannot be read.
        """
        self.read()
        return self._hashes

    def read(self) -> list[Approval]:
        """The approved blocks, oldest first.

        Raises:
            ApprovalsError: the file cannot be read.
        """
        try:
            found = self.path.stat()
            state = found.st_mtime_ns, found.st_size, found.st_ino
            if state != self._seen:
                self._file = msgspec.json.decode(self.path.read_bytes(), type=_File)
                self._hashes = frozenset(one.hash for one in self._file.approved)
                self._seen = state
        except FileNotFoundError:
            self._file, self._hashes, self._seen = _File(), frozenset(), None
        except (OSError, ValueError) as error:
            raise ApprovalsError(f"{self.path}: {error}") from error
        return self._file.approved

    def add(self, name: str, hash: str, text: str, by: str = "") -> None:
        """Approve a block, if it is not approved yet, and write the file.

        Raises:
            ApprovalsError: the file cannot be read or written.
        """
        approved = [one for one in self.read() if one.hash != hash]
        self._write([*approved, Approval(hash=hash, name=name, text=text, by=by, time=time.time())])

    def remove(self, hash: str) -> bool:
        """Take back an approval. Returns whether there was one.

        Raises:
            ApprovalsError: the file cannot be read or written.
        """
        before = self.read()
        left = [one for one in before if one.hash != hash]
        if len(left) != len(before):
            self._write(left)
        return len(left) != len(before)

    def _write(self, approved: list[Approval]) -> None:
        data = msgspec.json.format(msgspec.json.encode(_File(approved)), indent=1)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_bytes(data + b"\n")
            os.replace(beside, self.path)
        except OSError as error:
            raise ApprovalsError(f"{self.path}: {error}") from error

    def difference(self, name: str, text: str) -> str:
        """A unified diff of a block to what was approved last under its name; `""` if nothing was."""
        before = [one for one in self.read() if one.name == name]
        if not before:
            return ""
        lines = difflib.unified_diff(
            *(before[-1].text.splitlines(keepends=True), text.splitlines(keepends=True)),
            *(f"approved {before[-1].hash[:12]}", "now"),
        )
        return "".join(lines)
