"""API keys: who calls, what they may do, and which traces they see.

The keys stand in a TOML file, each by the SHA-256 of its text:

    [[key]]
    name = "alice"
    sha256 = "9f86d0..."
    rights = ["read", "steer", "submit"]
    tenant = "red"              # optional: sees only this tenant's traces
    concurrency = 8             # optional limits: requests at once,
    requests_per_minute = 120
    tokens_per_minute = 100000  # sampled tokens
    body_bytes = 1000000

The gateway reads the file again when it has changed. A file that cannot be read leaves the last keys in force.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias, get_args

import msgspec

from tracewire import TraceRejected
from tracewire.submission import checked_trace_id

from .problems import Problem

__all__ = ["EVERYBODY", "RIGHTS", "Caller", "InvalidKeys", "Keys", "Right", "entry_of", "new_key"]

logger = logging.getLogger("tracewire.gateway")

Right: TypeAlias = Literal["read", "steer", "submit", "code", "operate"]
"""What a key may do: read traces; steer, pause and cancel them; submit them; send code that engines run; operate."""
RIGHTS: frozenset[str] = frozenset(get_args(Right))

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class InvalidKeys(ValueError):
    """The file of keys cannot be used."""


class Caller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key of the file, and who holds it. Limits of 0 are none."""

    name: str
    sha256: str = ""
    rights: frozenset[str] = RIGHTS
    tenant: str = ""
    concurrency: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    body_bytes: int = 0

    def require(self, right: Right) -> None:
        """Check that the key has a right.

        Raises:
            Problem: it has not.
        """
        if right not in self.rights:
            raise Problem(403, f"this needs the right {right!r}, which the key {self.name!r} lacks", code="not_allowed")

    def sees(self, trace_id: str) -> bool:
        """Whether the key's tenant may see a trace."""
        return not self.tenant or trace_id.startswith(f"{self.tenant}:")

    def trace_id(self, wanted: str | None) -> str:
        """The id of a trace that the caller submits, with the tenant before it.

        Raises:
            TraceRejected: the wanted id is none, or is another tenant's.
        """
        plain = checked_trace_id(wanted)
        if not self.tenant or plain.startswith(f"{self.tenant}:"):
            return plain
        if ":" in plain:
            raise TraceRejected("trace_id", f"expected an id without ':', or one that begins with '{self.tenant}:'")
        return checked_trace_id(f"{self.tenant}:{plain}")


#: The caller of a gateway without keys.
EVERYBODY = Caller("anonymous")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[Caller]


def _parsed(text: str) -> dict[bytes, Caller]:
    try:
        callers = msgspec.convert(tomllib.loads(text), _File).key
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidKeys(str(error)) from None
    found: dict[bytes, Caller] = {}
    names = set()
    for caller in callers:
        for field, value in (("name", caller.name), ("tenant", caller.tenant or "none")):
            if not _NAME.fullmatch(value):
                raise InvalidKeys(f"{field}: expected letters, digits, '.', '_' or '-', got {value[:80]!r}")
        if caller.name in names:
            raise InvalidKeys(f"name: two keys are called {caller.name!r}")
        names.add(caller.name)
        if not _SHA256.fullmatch(caller.sha256):
            raise InvalidKeys(f"sha256: expected 64 hexadecimal digits for the key {caller.name!r}")
        if unknown := sorted(caller.rights - RIGHTS):
            raise InvalidKeys(f"rights: {unknown[0]!r} is none of {', '.join(sorted(RIGHTS))}")
        found[bytes.fromhex(caller.sha256)] = caller
    if len(found) != len(callers):
        raise InvalidKeys("sha256: two entries have the same key")
    return found


@dataclass(frozen=True)
class _Seen:
    """What a file looked like when it was read."""

    changed_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Seen:
        found = path.stat()
        return cls(found.st_mtime_ns, found.st_size, found.st_ino)


class Keys:
    """The keys of a file, or of no file, for a gateway on loopback that serves everybody.

    Raises:
        InvalidKeys: the file cannot be used.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path | None, *, age_s: float = 1.0, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._age_s = age_s
        self._clock = clock
        self._keys: dict[bytes, Caller] = {}
        self._seen: _Seen | None = None
        if path is not None:
            self._read(path)
        self._looked = clock()

    def _read(self, path: Path) -> None:
        seen = _Seen.of(path)
        try:
            self._keys = _parsed(path.read_text())
        finally:
            self._seen = seen

    def _refresh(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked < self._age_s:
            return
        self._looked = now
        try:
            if _Seen.of(self._path) != self._seen:
                self._read(self._path)
                logger.info("read %d keys from %s", len(self._keys), self._path)
        except (OSError, UnicodeDecodeError, InvalidKeys) as error:
            logger.error("the keys of %s cannot be read, the last ones stay in force: %s", self._path, error)

    @property
    def can_change(self) -> bool:
        """Whether there is a file, which may change."""
        return self._path is not None

    def holds(self, caller: Caller) -> bool:
        """Whether a key that let a caller in is still there, for the same tenant and with no right less."""
        if self._path is None:
            return True
        self._refresh()
        now = self._keys.get(bytes.fromhex(caller.sha256))
        if now is None or (now.name, now.tenant) != (caller.name, caller.tenant):
            return False
        return now.rights >= caller.rights

    def caller(self, authorization: str | None) -> Caller:
        """The caller with this `Authorization` header.

        Raises:
            Problem: there are keys, and the header has none of them.
        """
        if self._path is None:
            return EVERYBODY
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        # Looked up by its hash: how long this takes says nothing about the key.
        found = self._keys.get(hashlib.sha256(key.strip().encode("utf-8", "replace")).digest())
        if scheme.lower() != "bearer" or found is None:
            what = "no API key" if not key else "an unknown API key"
            raise Problem(
                401,
                f"the request has {what}: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def new_key() -> str:
    """A new key of 256 random bits."""
    return f"tw-{secrets.token_urlsafe(32)}"


def entry_of(key: str, name: str, rights: frozenset[str], tenant: str) -> str:
    """The entry of a key for the file.

    Raises:
        InvalidKeys: it would be refused.
    """
    listed = ", ".join(f'"{right}"' for right in sorted(rights))
    lines = ["[[key]]", f'name = "{name}"', f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"']
    lines += [f"rights = [{listed}]", *([f'tenant = "{tenant}"'] if tenant else [])]
    text = "\n".join(lines) + "\n"
    _parsed(text)
    return text
