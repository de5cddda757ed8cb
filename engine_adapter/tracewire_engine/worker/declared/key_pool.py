"""Keys of the positions so far, of requests whose attention patterns are computed.

A pattern needs the keys of all earlier positions. The KV cache has them, but each attention backend lays it out in its
own way, and on CPUs it is packed for the instruction set at hand. So the worker keeps a copy of the keys that its
patterns need, from the same tensors that enter the attention. A request with interventions computes all of its prompt
itself, so none of its keys comes from a prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        #: How many positions of each request have keys.
        self._lengths: dict[int, int] = {}

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

    def has(self, owner: int) -> bool:
        """Whether a request has a slot."""
        return owner in self._slots

    def admit(self, lengths: Mapping[int, int], like: torch.Tensor, most: int, *, ample: bool = True) -> None:
        """Give requests room for the keys of so many first positions of each, by `fit`.

        Raises:
            ValueError: there is no such room. The pool stays as it was.
        """
        slots, before = dict(self._slots), dict(self._lengths)
        self.slots(lengths)
        for owner, length in lengths.items():
            self._lengths[owner] = max(length, before.get(owner, 0))
        try:
            self.fit(like, max(lengths.values()), most, ample=ample)
        except Exception:
            self._slots, self._lengths = slots, before
            raise

    def fit(self, like: torch.Tensor, length: int, most: int, *, ample: bool = True) -> torch.Tensor:
        """The pool, with room for all slots and for `length` positions of keys such as `like`, `[rows, heads, size]`.

        `ample`: it may have more room than it needs.

        Raises:
            ValueError: the pool would have more than `most` bytes.
        """
        slots = max(self._slots.values(), default=0) + 1
        old = self.keys
        if old is not None and old.shape[0] >= slots and old.shape[2] >= length:
            return old
        have = (0, 0) if old is None else (old.shape[0], old.shape[2])
        longest = max(length, *self._lengths.values(), 0)
        rounded = -(-longest // _POSITIONS) * _POSITIONS
        sizes = [(slots, rounded), (slots, longest)]
        if ample:
            # By doubling, so that the copies cost no more than the keys.
            sizes.insert(0, (max(slots, have[0]), have[1] if have[1] >= length else max(rounded, 2 * have[1])))
        each = like.element_size() * like.shape[1] * like.shape[2]
        fitting = next(((count, wide) for count, wide in sizes if count * wide * each <= most), None)
        if fitting is None:
            raise ValueError(
                f"the keys of {slots} requests and {longest} positions need {slots * longest * each} bytes beside the "
                f"KV cache, and {most} are left for attention patterns; name fewer layers"
            )
        made = like.new_zeros((fitting[0], like.shape[1], fitting[1], like.shape[2]))
        if old is not None:
            both = min(have[0], fitting[0]), min(have[1], fitting[1])
            made[: both[0], :, : both[1]] = old[: both[0], :, : both[1]]
        self.keys = made
        return made

    def release(self, owner: int) -> None:
        """Free the slot of a request, and the pool with the last."""
        self._slots.pop(owner, None)
        self._lengths.pop(owner, None)
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

    def admit(self, pool: KeyPool, lengths: Mapping[int, int], like: torch.Tensor) -> dict[int, Exception]:
        """Give requests room in a pool for so many positions of each. Pools double for as long as all of them can.

        Returns the errors of those for which there is no room. The others have theirs; a request that has had keys here
        comes before one that has not.
        """
        ample = 2 * sum(one.nbytes for one in self.pools.values()) <= MOST_BYTES
        failed: dict[int, Exception] = {}
        try:
            pool.admit(lengths, like, self.left(pool), ample=ample)
        except Exception:  # too many keys, or out of memory
            for owner in sorted(lengths, key=lambda owner: not pool.has(owner)):
                try:
                    pool.admit({owner: lengths[owner]}, like, self.left(pool), ample=ample)
                except Exception as error:
                    failed[owner] = error
                    self._drop(owner)
        return failed

    def _drop(self, owner: int) -> None:
        """Free the slots of a request that has failed. The pools stay where the step under way has them."""
        for pool in self.pools.values():
            pool.release(owner)

    def release(self, owner: int) -> None:
        """Free what a request has in all pools."""
        for location, pool in list(self.pools.items()):
            pool.release(owner)
            if pool.keys is None:
                del self.pools[location]
