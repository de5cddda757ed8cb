"""Keys of the positions so far, of requests whose attention patterns are computed.

A pattern needs the keys of all earlier positions. The KV cache has them, but each attention backend lays it out in its
own way, and on CPUs it is packed for the instruction set at hand. So the worker keeps a copy of the keys that its
patterns need, from the same tensors that enter the attention. A request with interventions computes all of its prompt
itself, so none of its keys comes from a prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

__all__ = ["MOST_BYTES", "KeyPool", "KeyPools"]

#: Most bytes of keys on a worker.
MOST_BYTES: Final = 1 << 30
#: Positions are added to a pool at least so many at a time.
_POSITIONS: Final = 256


class KeyPool:
    """The keys at one location: `[slots, kv_heads, positions, size]`, with a slot for each request."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self._slots: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the keys on the device."""
        return 0 if self.keys is None else int(self.keys.nbytes)

    def slots(self, owners: Iterable[int]) -> list[int]:
        """The slots of requests, which get one if they have none."""
        found = []
        for owner in owners:
            slot = self._slots.get(owner)
            if slot is None:
                taken = set(self._slots.values())
                slot = self._slots[owner] = next(free for free in range(len(taken) + 1) if free not in taken)
            found.append(slot)
        return found

    def fit(self, like: torch.Tensor, length: int, most: int) -> torch.Tensor:
        """The pool, with room for all slots and for `length` positions of keys such as `like`, `[rows, heads, size]`.

        Raises:
            ValueError: the pool would have more than `most` bytes.
        """
        slots = max(self._slots.values(), default=0) + 1
        old = self.keys
        if old is not None and old.shape[0] >= slots and old.shape[2] >= length:
            return old
        have = (0, 0) if old is None else (old.shape[0], old.shape[2])
        # By doubling, so that the copies cost no more than the keys.
        grown = max(-(-length // _POSITIONS) * _POSITIONS, 2 * have[1])
        shape = (max(slots, have[0]), like.shape[1], have[1] if have[1] >= length else grown, like.shape[2])
        nbytes = like.element_size() * shape[0] * shape[1] * shape[2] * shape[3]
        if nbytes > most:
            raise ValueError(
                f"the keys of {shape[0]} requests and {shape[2]} positions need {nbytes} bytes beside the KV cache, "
                f"and {most} are left for attention patterns; name fewer layers"
            )
        made = like.new_zeros(shape)
        if old is not None:
            made[: have[0], :, : have[1]] = old
        self.keys = made
        return made

    def release(self, owner: int) -> None:
        """Free the slot of a request, and the pool with the last."""
        self._slots.pop(owner, None)
        if not self._slots:
            self.keys = None


class KeyPools:
    """The pools of all locations on a worker."""

    def __init__(self) -> None:
        self.pools: dict[str, KeyPool] = {}

    def at(self, location: str) -> KeyPool:
        """The pool of a location."""
        return self.pools.setdefault(location, KeyPool())

    def left(self, pool: KeyPool) -> int:
        """How many bytes a pool may have."""
        return MOST_BYTES - sum(other.nbytes for other in self.pools.values() if other is not pool)

    def release(self, owner: int) -> None:
        """Free what a request has in all pools."""
        for location, pool in list(self.pools.items()):
            pool.release(owner)
            if pool.keys is None:
                del self.pools[location]
