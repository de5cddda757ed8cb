"""The KV blocks that traced requests leave: a worker keeps a copy of them and zeroes them.

vLLM computes what it has preempted anew, all tokens in one step. A block would then see all of them at once, once more,
and what it had changed at earlier positions would be changed as the step at hand has it. So the scheduler
(`scheduler.py`) counts what a traced request had computed as computed, and the workers see to it that it is: each
copies its own share of the request's KV blocks before the step in which others may write to them, and puts it into the
blocks that the request is given later. A recurrent layer's state is a block like any other, and as it was after the
request's last step.

What an intervention makes of activations may be infinite or NaN, and then so are keys and values computed from them.
The next request that is given such a KV block writes to its first slots only. An attention kernel that reads the others
and multiplies what it finds there by a weight of zero gets NaN: vLLM's kernels for CPUs do, and kernels are free to. So
the blocks that a traced request leaves are zeroed before anybody else writes to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

__all__ = ["KVBlocks", "PreemptedKVCache"]


class _SavedBlocks:
    __slots__ = ("groups", "places", "tensors")

    def __init__(self, groups: list[list[int]], places: dict[int, int], tensors: list[torch.Tensor]) -> None:
        #: The blocks that the request had, by KV cache group.
        self.groups = groups
        #: Where in the copies each of them is.
        self.places = places
        self.tensors = tensors


class KVBlocks:
    """A worker's KV caches as blocks.

    `caches` are the runner's (tensors, or lists of tensors), in each of which one of the first two dimensions counts
    `blocks` blocks, or so many times some number of smaller ones.
    """

    def __init__(self, caches: Iterable[Any], blocks: int) -> None:
        self._blocks = blocks
        #: Each cache as `[blocks, smaller blocks in each, ...]`, whatever its elements mean.
        self.views: list[torch.Tensor] = []
        seen: set[tuple[int, Any, Any]] = set()
        for cache in _flat(caches):
            # Layers that share their KV.
            key = cache.data_ptr(), cache.shape, cache.stride()
            if key not in seen:
                seen.add(key)
                self.views.append(self._view(cache, _block_dimension(cache, blocks)))

    def zero(self, ids: Collection[int]) -> None:
        """Zero these blocks, in the order of what the device is doing."""
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
    """The KV of preempted requests that this worker keeps, by the scheduler's name of each."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._caches = blocks.views
        self._saved: dict[str, _SavedBlocks] = {}

    def __len__(self) -> int:
        return len(self._saved)

    def save(self, request: str, groups: Iterable[Iterable[int]]) -> None:
        """Copy the blocks that a request had, a list of ids for each group, with 0 where it had none."""
        held = [list(group) for group in groups]
        # Block 0 stands for none.
        ids = sorted({block for group in held for block in group} - {0})
        tensors = [cache.index_select(0, self._index(ids, cache)).cpu() for cache in self._caches]
        self._saved[request] = _SavedBlocks(held, {block: place for place, block in enumerate(ids)}, tensors)

    def restore(self, request: str, groups: Iterable[Iterable[int]]) -> None:
        """Write what was kept of a request, if anything was, into the blocks that it has now, and forget it."""
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
        """Drop what is kept of requests that are over."""
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
