"""Attention patterns: the weights of some heads, of the queries and keys that enter a layer's attention.

At each location with patterns stand two groups: `KeyGroup` keeps the step's keys (`key_pool.py`), and `PatternGroup`
behind it computes the weights of its rows' queries. Requests that generate run together, whatever their lengths; rows
of a prompt run request by request.

Under tensor parallelism each rank computes the weights of its own heads, and the ranks then add their results up, of
which all but one are zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from tracewire_bus.wire.messages import AttentionPattern

from .groups import Group, LocationValues, ReadGroup, Rows
from .key_pool import KeyPool, KeyPools
from .members import Member, Members

__all__ = ["AttentionSite", "KeyGroup", "PatternGroup", "SiteGroup"]

#: Bytes of weights, and of the keys for them, that are on the device at once; and of weights that one item may have.
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
        fail: ends the interventions of members' requests with an error.
    """

    module: Any
    pools: KeyPools
    pool: KeyPool
    steps: Callable[[], int]
    fail: Callable[[Iterable[Member], Exception], None]
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
        self.positions = _rows_of(self.rows, self.members, device)
        #: The position behind each member's last row, in the plan's first step.
        self.ends = [member.at + count for member, count in zip(self.members, self.rows.counts, strict=True)]

    def alive(self) -> list[bool]:
        """Of each member, whether its request goes on."""
        return [member.declaration.failure is None for member in self.members]

    def rows_where(self, kept: list[bool], device: torch.device) -> tuple[Any, torch.Tensor]:
        """An index of the rows of the members that are kept, and the slot of each such row."""
        pairs = list(zip(self.members, self.rows.counts, kept, strict=True))
        slots = self.attention.pool.slots(id(member.declaration) for member, _, stays in pairs if stays)
        counts = [count for _, count, stays in pairs if stays]
        repeated = torch.tensor(
            [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)],
            dtype=torch.int64,
            device=device,
        )
        if all(kept):
            return slice(None), repeated
        index = [row for row, stays in enumerate(stays for _, count, stays in pairs for _ in range(count)) if stays]
        return torch.tensor(index, dtype=torch.int64, device=device), repeated

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
        lengths: dict[int, int] = {}
        for member, end, alive in zip(self.members, self.ends, self.alive(), strict=True):
            if alive:
                owner = id(member.declaration)
                lengths[owner] = max(lengths.get(owner, 0), end + step)
        failed = site.pools.admit(site.pool, lengths, keys) if lengths else {}
        for member in self.members:
            if (error := failed.get(id(member.declaration))) is not None:
                site.fail([member], error)
        kept = self.alive()
        if not any(kept):
            return
        rows, slots = self.rows_where(kept, keys.device)
        pool = site.pool.keys
        assert pool is not None
        pool[slots, :, self.positions[rows] + step] = keys[rows]


class _Queries(NamedTuple):
    """Queries `[rows, heads, size]` with their positions and slots, and how many of the rows are computed together."""

    values: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parts: list[int]


class PatternGroup(ReadGroup, SiteGroup):
    """Reads for an `AttentionPattern`."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        ReadGroup.__init__(self, members, rows, residual, device)
        op = members[0].op
        self._heads = list(range(op.head_size[0])) if op.heads is None else op.heads

    def run(self, location: LocationValues) -> None:
        assert isinstance(self.one, AttentionPattern)
        step, site = self.attention.steps(), self.attention
        queries = self.rows.take(location.tensors[0])
        queries = queries.reshape(len(queries), -1, self.size)
        width = (self.one.top_k, 2) if self.one.top_k else (max(self.ends) + step,)
        self._refuse_large(math.prod(width), step)
        kept = self.alive()
        if not any(kept):
            return
        length = max(end for end, stays in zip(self.ends, kept, strict=True) if stays) + step
        found = torch.zeros(len(queries), len(self._heads), *width, device=queries.device)
        count = queries.shape[1]
        first = 0 if site.add is None else site.rank * count
        here = [(place, head - first) for place, head in enumerate(self._heads) if first <= head < first + count]
        if here:
            places, heads = (torch.tensor(list(one), device=queries.device) for one in zip(*here, strict=True))
            rows, slots = self.rows_where(kept, queries.device)
            taken = _Queries(queries[rows][:, heads], self.positions[rows] + step, slots, self._parts(kept))
            pieces = torch.zeros(len(taken.values), len(self._heads), *width, device=queries.device)
            pieces[:, places] = self._patterns(taken, heads, count, length)
            found[rows] = pieces
        assert self.collector is not None
        self.collector.lacking.update(id(one.declaration) for one in self.members if one.declaration.failure)
        if site.add is not None:
            if not site.agree(self.members):
                return
            found = site.add(found)
        self.collector.found[self.site] = found

    def _refuse_large(self, width: int, step: int) -> None:
        """Fail members of which one item would be too large."""
        for member, count, end in zip(self.members, self.rows.counts, self.ends, strict=True):
            if count * len(self._heads) * width * 4 > _MOST_ITEM:
                message = f"the pattern of {count} positions over {end + step} is too large: set top_k"
                self.attention.fail([member], ValueError(message))

    def _parts(self, kept: list[bool]) -> list[int]:
        """How many rows are computed together: of one request, or of all that have one each."""
        counts = [count for count, stays in zip(self.rows.counts, kept, strict=True) if stays]
        return [len(counts)] if self.rows.single else counts

    def _patterns(self, queries: _Queries, heads: torch.Tensor, count: int, length: int) -> torch.Tensor:
        """`[rows, heads, ...]` of queries: the weights, or the greatest with their positions.

        `heads` are those of the queries, of the rank's `count` heads.
        """
        pool = self.attention.pool.keys
        assert pool is not None
        # Under grouped queries, as many heads next to each other share their keys.
        shared = heads // max(1, count // pool.shape[1])
        pieces: list[torch.Tensor] = []
        start = 0
        for rows_of_part in queries.parts:
            end = start + rows_of_part
            at_once = max(1, _CHUNK // (4 * len(heads) * length))
            for begin in range(start, end, at_once):
                rows = slice(begin, min(begin + at_once, end))
                scores = self._scores(queries.values[rows], queries.slots[rows], shared, length)
                pieces.append(self._chosen(self._weights(scores, queries.positions[rows])))
            start = end
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _scores(self, queries: torch.Tensor, slots: torch.Tensor, shared: torch.Tensor, length: int) -> torch.Tensor:
        """The products of queries `[rows, heads, size]` and their keys, float32 `[rows, heads, length]`.

        `shared` has the head of the keys of each. Keys are copied in pieces: of some rows, heads and positions.
        """
        pool = self.attention.pool.keys
        assert pool is not None
        found = queries.new_empty(*queries.shape[:2], length, dtype=torch.float32)
        # A key as it is kept, and in float32.
        each = self.size * (pool.element_size() + 4)
        positions = max(1, min(length, _CHUNK // each))
        heads = max(1, min(len(shared), _CHUNK // (each * positions)))
        # Rows of one request have their keys in common.
        at_once = max(1, _CHUNK // (each * positions * heads)) if self.rows.single else len(queries)
        for row, head, start in itertools.product(
            range(0, len(queries), at_once), range(0, len(shared), heads), range(0, length, positions)
        ):
            end = min(start + positions, length)
            here = slice(row, row + at_once), slice(head, head + heads), slice(start, end)
            mine, of_heads = queries[here[:2]].float(), shared[here[1]]
            if self.rows.single:
                keys = pool[slots[here[0], None], of_heads, here[2]]
                found[here] = torch.einsum("rhd,rhld->rhl", mine, keys.float())
            else:
                keys = pool[slots[0], of_heads, here[2]]
                found[here] = torch.einsum("rhd,hld->rhl", mine, keys.float())
            del keys
        return found

    def _weights(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The weights of scores `[rows, heads, length]`, as the layer's kernel makes them. Writes to the scores."""
        impl = self.attention.module.impl
        scores.mul_(impl.scale)
        cap = float(getattr(impl, "logits_soft_cap", 0) or 0)
        if cap > 0:
            scores.div_(cap).tanh_().mul_(cap)
        keys = torch.arange(scores.shape[-1], device=scores.device)
        hidden = keys > positions[:, None]
        window = getattr(self.attention.module, "sliding_window", None)
        if isinstance(window, int) and window > 0:
            hidden |= keys <= positions[:, None] - window
        return scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)

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
