"""Puts the columns of merged layers in order under tensor parallelism, as if there were one rank.

A `QKVParallelLinear` computes queries, keys and values at once, and a `MergedColumnParallelLinear` several projections.
Each rank has a part of every projection. nnsight gathers the ranks' outputs one after the other: the queries, keys and
values of the first rank, then those of the second. This module reorders the columns to all queries, all keys, all
values, and back.
"""

from __future__ import annotations

from typing import Any

import torch
from nnsight.modeling.vllm.fragments import VLLMFragments
from nnsight.util import apply
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

__all__ = ["ColumnFragments", "gathered", "piece"]


class ColumnFragments(VLLMFragments):
    """nnsight's fragments, which in addition know how the columns of merged layers are spread over the ranks."""

    def whole(self, location: str, value: Any) -> tuple[Any, Any]:
        whole, undo = super().whole(location, value)
        merged = self._merged(location)
        if merged is None:
            return whole, undo
        return apply(whole, lambda tensor: gathered(tensor, *merged[:3]), torch.Tensor), undo

    def split(self, location: str, whole: Any) -> Any:
        merged = self._merged(location)
        if merged is None:
            return super().split(location, whole)
        return apply(whole, lambda tensor: piece(tensor, *merged), torch.Tensor)

    def _merged(self, location: str) -> tuple[list[int], int, int, int] | None:
        """How a merged layer's output is spread; `None` for another location.

        Returns:
            The columns of each projection on a rank, the number of ranks, how many ranks hold the same keys and
            values, and this rank's index.
        """
        module, side = self.rules[location]
        if side != "output" or not isinstance(module, MergedColumnParallelLinear | QKVParallelLinear):
            return None
        replicas = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) else 1
        return list(module.output_partition_sizes), module.tp_size, replicas, module.tp_rank


def gathered(tensor: torch.Tensor, sizes: list[int], ranks: int, replicas: int) -> torch.Tensor:
    """Reorder the columns of all ranks to the order of the unsharded layer. `piece` is the inverse, for one rank.

    Args:
        tensor: `[..., columns]`, the ranks' outputs one after the other.
        sizes: the columns of each projection on a rank.
        ranks: how many ranks there are.
        replicas: on how many ranks each part of a projection but the first is repeated.
    """
    if tensor.shape[-1] != sum(sizes) * ranks:
        return tensor
    by_rank = [part.split(sizes, dim=-1) for part in tensor.chunk(ranks, dim=-1)]
    found = [part[place] for place in range(len(sizes)) for part in (by_rank if place == 0 else by_rank[::replicas])]
    return torch.cat(found, dim=-1)


def piece(tensor: torch.Tensor, sizes: list[int], ranks: int, replicas: int, rank: int) -> torch.Tensor:
    """Take one rank's part, as that rank holds it, of `[..., columns]` in the order of the unsharded layer."""
    totals = [size * ranks // (1 if place == 0 else replicas) for place, size in enumerate(sizes)]
    parts = tensor.split(totals, dim=-1)
    return torch.cat(
        [
            part.narrow(-1, (rank if place == 0 else rank // replicas) * size, size)
            for place, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ],
        dim=-1,
    )
