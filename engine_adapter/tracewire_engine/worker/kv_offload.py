"""Keeps a copy of the KV cache of preempted traced requests, and zeroes the KV blocks that traced requests leave.

A KV block is a piece of vLLM's paged KV cache; it has nothing to do with a block of code. vLLM recomputes a preempted
request: all its tokens so far, in one step. The request's code would then see all these tokens again at once, and would
change earlier positions as it changes the current one. So the scheduler (`scheduler.py`) counts the computed tokens of
a preempted traced request as still computed, and the workers make that true. Each worker copies its own part of the
request's KV blocks before the step in which other requests may write to them, and later writes the copy into the KV
blocks that the request is given then. The state of a recurrent layer lies in KV blocks too, as it was after the
request's last step.

An intervention can make activations infinite or NaN, and then also the keys and values computed from them. The next
request that is given such a KV block writes only to its first slots. An attention kernel may read the other slots and
multiply them by a weight of zero, which gives NaN; vLLM's kernels for CPUs do so. So the worker zeroes the KV blocks
that a traced request leaves before another request writes to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

__all__ = ["KVBlocks", "PreemptedKVCache"]


class _SavedBlocks:
    __slots__ = ("groups", "places", "tensors")

    def __init__(self, groups: list[list[int]], places: dict[int, int], tensors: list[torch.Tensor]) -> None:
        #: The ids of the KV blocks that the request had, by KV cache group.
        self.groups = groups
        #: The row of each KV block in the copies, by the block's id.
        self.places = places
        self.tensors = tensors


class KVBlocks:
    """A worker's KV caches, seen as KV blocks.

    Args:
        caches: the runner's KV caches, tensors or lists of tensors. One of the first two dimensions of each has
            `blocks` entries, or a multiple of that if vLLM cuts its blocks into smaller ones there.
        blocks: how many KV blocks there are.

    Raises:
        ValueError: a cache has no such dimension.
    """

    def __init__(self, caches: Iterable[Any], blocks: int) -> None:
        self._blocks = blocks
        #: Each cache as `[blocks, smaller blocks in each, ...]`.
        self.views: list[torch.Tensor] = []
        seen: set[tuple[int, Any, Any]] = set()
        for cache in _flat(caches):
            # Layers can share one KV cache.
            key = cache.data_ptr(), cache.shape, cache.stride()
            if key not in seen:
                seen.add(key)
                self.views.append(self._view(cache, _block_dimension(cache, blocks)))

    def zero(self, ids: Collection[int]) -> None:
        """Zero the KV blocks with these ids, in order with the device's other work."""
        device: torch.device | None = None
        for cache in self.views:
            if cache.device != device:
                device = cache.device
                index = torch.tensor(list(ids), dtype=torch.int64)
                index = index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)
            cache.index_fill_(0, index, 0)

    def _view(self, cache: torch.Tensor, dimension: int) -> torch.Tensor:
        plain = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        return plain.unflatten(dimension, (self._blocks, -1)).movedim(dimension, 0)


class PreemptedKVCache:
    """This worker's copies of the KV cache of preempted requests, in host memory, by the scheduler's request id."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._caches = blocks.views
        self._saved: dict[str, _SavedBlocks] = {}

    def __len__(self) -> int:
        return len(self._saved)

    def save(self, request: str, groups: Iterable[Iterable[int]]) -> None:
        """Copy the KV blocks that a request had: a list of block ids for each KV cache group, 0 for no block."""
        held = [list(group) for group in groups]
        # The id 0 means no block.
        ids = sorted({block for group in held for block in group} - {0})
        tensors = [cache.index_select(0, self._index(ids, cache)).cpu() for cache in self._caches]
        self._saved[request] = _SavedBlocks(held, {block: place for place, block in enumerate(ids)}, tensors)

    def restore(self, request: str, groups: Iterable[Iterable[int]]) -> None:
        """Write the copy of a request's KV blocks, if there is one, into the blocks that it has now, and drop the copy.

        Args:
            request: the scheduler's id.
            groups: the ids of the blocks that the request has now, as for `save`.
        """
        kept = self._saved.pop(request, None)
        if kept is None:
            return
        pairs = {
            new: kept.places[old]
            for had, has in zip(kept.groups, groups, strict=True)
            for old, new in zip(had, has, strict=False)
            if old and new
        }
        if not pairs:
            return
        for cache, copy in zip(self._caches, kept.tensors, strict=True):
            values = copy[list(pairs.values())].to(cache.device)
            cache.index_copy_(0, self._index(list(pairs), cache), values)

    def forget(self, requests: Collection[str]) -> None:
        """Drop the copies of requests that are over."""
        for request in self._saved.keys() & requests:
            del self._saved[request]

    @staticmethod
    def _index(ids: list[int], cache: torch.Tensor) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=cache.device)


def _flat(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _flat(cache)


def _block_dimension(cache: torch.Tensor, blocks: int) -> int:
    for dimension in (0, 1):
        if cache.ndim > dimension and cache.shape[dimension] and cache.shape[dimension] % blocks == 0:
            return dimension
    raise ValueError(f"a KV cache of shape {tuple(cache.shape)} has no dimension of {blocks} blocks")
