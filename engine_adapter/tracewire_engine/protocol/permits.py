"""Permits: the adapter's word to the workers that a block may run.

The adapter stamps each block that its policy allows (`adapter/code_policy.py`) with a keyed digest, and a worker runs
no block without a valid stamp. So a block that reaches a worker by another way than through the adapter's policy does
not run. The adapter makes the key anew for each engine.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

__all__ = ["CheckedPermits", "NoPermit", "Permits"]

_DIGEST = 16
_FREE, _LIMITED = b"\0", b"\1"


class NoPermit(PermissionError):
    """A block has no valid permit of this engine's adapter."""


class Permits:
    """Stamps blocks, and checks stamps, with one key. An empty key makes no stamps, and lets every block run."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, block: bytes, *, limited: bool) -> bytes:
        """The stamp of an encoded block; `b""` without a key. `limited` says whether the limit on imports applies."""
        if not self._key:
            return b""
        flag = _LIMITED if limited else _FREE
        return flag + blake2b(flag + block, key=self._key, digest_size=_DIGEST).digest()

    def check(self, block: bytes, stamp: bytes) -> bool:
        """Check the stamp of an encoded block. Returns whether the limit on imports applies to the block.

        Raises:
            NoPermit: the stamp is missing, or of another block or engine.
        """
        if not self._key:
            return False
        limited = stamp[:1] == _LIMITED
        if not hmac.compare_digest(self.of(block, limited=limited), stamp):
            raise NoPermit("the engine's adapter has not permitted this block (--code)")
        return limited


class CheckedPermits(Permits):
    """Takes stamps at their word: of a process without the key, to which a worker gives blocks that it has checked."""

    def __init__(self) -> None:
        super().__init__(b"")

    def check(self, block: bytes, stamp: bytes) -> bool:
        return stamp[:1] == _LIMITED
