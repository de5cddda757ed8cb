"""Attention patterns: the weights of some heads, of the queries and keys that enter a layer's attention.

At each location with patterns stand two groups: `KeyGroup` keeps the step's keys (`key_pool.py`), and `PatternGroup`
behind it computes the weights of its rows' queries. Requests that generate run together, whatever their lengths; rows
of a prompt run request by request.

Under tensor parallelism each rank computes the weights of its own heads, and the ranks then add their results up, of
which all but one are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from tracewire_bus.wire.messages import AttentionPattern

from .groups import Group, LocationValues, ReadGroup, Rows
from .key_pool import KeyPool, KeyPools
from .members import Member, Members

__all__ = ["AttentionSite", "KeyGroup", "PatternGroup", "SiteGroup"]

#: Bytes of weights that are computed at once, and of those that one item may have.
_CHUNK: Final = 64 << 20
_MOST_ITEM: Final = 256 << 20


@dataclass(frozen=True)
class AttentionSite:
    """What a pattern needs at a location.

    Attributes:
        module: vLLM's attention.
        pools: where keys are kept.
        pool: that of this location.
        steps: how many steps the plan had before this one.
        rank, add: the number of this rank, and what adds up a tensor of all ranks; `None` with one rank.
        agree: whether all ranks will do so for these members.
    """

    module: Any
    pools: KeyPools
    pool: KeyPool
    steps: Callable[[], int]
    rank: int = 0
    add: Callable[[torch.Tensor], torch.Tensor] | None = None
    agree: Callable[[Iterable[Member]], bool] = lambda _: True


def _rows_of(rows: Rows, members: Members, device: torch.device) -> torch.Tensor:
    """The position of each row in its sequence, int64 `[rows]`, in the plan's first step."""
    found = [member.at + row for member, count in zip(members, rows.counts, strict=True) for row in range(count)]
    return torch.tensor(found, dtype=torch.int64, device=device)


class SiteGroup(Group):
    """Base of the groups at an attention."""

    attention: AttentionSite
    #: The memory that it reads grows from step to step.
    steady = False

    def begin(self, attention: AttentionSite, device: torch.device) -> None:
        """Set up what stays the same for the plan."""
        self.attention = attention
        slots = self.attention.pool.slots(id(member.declaration) for member in self.members)
        self.positions = _rows_of(self.rows, self.members, device)
        repeated = [slot for slot, count in zip(slots, self.rows.counts, strict=True) for _ in range(count)]
        self.slots = torch.tensor(repeated, dtype=torch.int64, device=device)
        self.longest = max(member.at + count for member, count in zip(self.members, self.rows.counts, strict=True))

    @property
    def size(self) -> int:
        """Features of a query and of a key."""
        return int(self.attention.module.head_size)


class KeyGroup(SiteGroup):
    """Keeps the keys of a step's rows, for the patterns of these and of later rows."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        self.members, self.rows, self.residual, self.one = members, rows, residual, members[0].op.one

    def serve(self, location: LocationValues) -> None:
        # Also where a condition does not hold: later positions need these keys.
        self.run(location)

    def run(self, location: LocationValues) -> None:
        if len(location.tensors) < 2:
            raise ValueError("this attention is not called with queries and keys")
        keys = self.rows.take(location.tensors[1])
        keys = keys.reshape(len(keys), -1, self.size)
        step, site = self.attention.steps(), self.attention
        pool = site.pool.fit(keys, self.longest + step, site.pools.left(site.pool))
        pool[self.slots, :, self.positions + step] = keys


class PatternGroup(ReadGroup, SiteGroup):
    """Reads for an `AttentionPattern`."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        ReadGroup.__init__(self, members, rows, residual, device)
        op = members[0].op
        self._heads = list(range(op.head_size[0])) if op.heads is None else op.heads

    def run(self, location: LocationValues) -> None:
        assert isinstance(self.one, AttentionPattern)
        pool, step = self.attention.pool.keys, self.attention.steps()
        assert pool is not None
        queries = self.rows.take(location.tensors[0])
        queries = queries.reshape(len(queries), -1, self.size)
        count = queries.shape[1]
        first = 0 if self.attention.add is None else self.attention.rank * count
        here = [(place, head - first) for place, head in enumerate(self._heads) if first <= head < first + count]
        length = self.longest + step
        width = (self.one.top_k, 2) if self.one.top_k else (length,)
        if len(queries) * len(self._heads) * width[0] * 4 > _MOST_ITEM:
            raise ValueError(f"the pattern of {len(queries)} positions over {length} is too large: set top_k")
        found = torch.zeros(len(queries), len(self._heads), *width, device=queries.device)
        if here:
            device = queries.device
            places = torch.tensor([place for place, _ in here], device=device)
            heads = torch.tensor([head for _, head in here], device=device)
            # Under grouped queries, as many heads next to each other share their keys.
            shared = heads // max(1, count // pool.shape[1])
            found[:, places] = self._patterns(queries[:, heads], pool, shared, length, step)
        assert self.collector is not None
        if self.attention.add is not None:
            if not self.attention.agree(self.members):
                return
            found = self.attention.add(found)
        self.collector.found[self.site] = found

    def _patterns(
        self, queries: torch.Tensor, pool: torch.Tensor, shared: torch.Tensor, length: int, step: int
    ) -> torch.Tensor:
        """`[rows, heads, ...]` of queries `[rows, heads, size]`: the weights, or the greatest with their positions."""
        pieces: list[torch.Tensor] = []
        positions = self.positions + step
        if self.rows.single:
            parts = [(0, len(queries))]
        else:
            starts = [sum(self.rows.counts[:number]) for number in range(len(self.rows.counts))]
            parts = [(start, start + count) for start, count in zip(starts, self.rows.counts, strict=True)]
        for start, end in parts:
            at_once = max(1, _CHUNK // (4 * queries.shape[1] * length))
            for begin in range(start, end, at_once):
                rows = slice(begin, min(begin + at_once, end))
                if self.rows.single:
                    keys = pool[self.slots[rows], :, :length].index_select(1, shared)
                    scores = torch.einsum("rhd,rhld->rhl", queries[rows].float(), keys.float())
                else:
                    keys = pool[self.slots[begin], :, :length].index_select(0, shared)
                    scores = torch.einsum("rhd,hld->rhl", queries[rows].float(), keys.float())
                pieces.append(self._chosen(self._weights(scores, positions[rows])))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _weights(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The weights of scores `[rows, heads, length]`, as the layer's kernel makes them."""
        impl = self.attention.module.impl
        scores = scores * impl.scale
        cap = float(getattr(impl, "logits_soft_cap", 0) or 0)
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        keys = torch.arange(scores.shape[-1], device=scores.device)
        hidden = keys > positions[:, None]
        window = getattr(self.attention.module, "sliding_window", None)
        if isinstance(window, int) and window > 0:
            hidden |= keys <= positions[:, None] - window
        return scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)

    def _chosen(self, weights: torch.Tensor) -> torch.Tensor:
        wanted = getattr(self.one, "top_k", 0)
        if not wanted:
            return weights
        top = weights.topk(min(wanted, weights.shape[-1]), dim=-1)
        # Positions that the query does not see have no weight. Positions are exact in float32 up to 2**24.
        places = torch.where(top.values > 0, top.indices, -1).float()
        found = torch.stack([places, top.values], -1)
        missing = wanted - found.shape[-2]
        if missing:
            empty = found.new_zeros(*found.shape[:2], missing, 2)
            empty[..., 0] = -1
            found = torch.cat([found, empty], -2)
        return found
