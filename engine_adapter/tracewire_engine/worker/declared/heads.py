"""Attention heads: reads, ablations and patches of some heads of the value that enters a layer's output projection.

The value has a row for each token, and the heads side by side in a row. Under tensor parallelism each rank has some of
the heads. A read gets the heads of all ranks gathered. An edit changes those that its rank has, and leaves the others
to their ranks (`LocationValues.shard`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .groups import Group, LocationValues, ReadGroup, Rows, column
from .members import Members

__all__ = ["HeadAblateGroup", "HeadReadGroup", "HeadSlots", "replace_heads", "slots_of"]


class HeadSlots:
    """Where the heads that an intervention names are among those of a value.

    Args:
        heads: the numbers of the heads.
        count: how many heads the layer has.
        size: features of a head.
    """

    def __init__(self, heads: Sequence[int], count: int, size: int) -> None:
        self.heads, self.count, self.size = list(heads), count, size
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def here(self, location: LocationValues) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads that this rank has: their places in the value, and their places among `heads`.

        Raises:
            ValueError: the value does not consist of such heads.
        """
        width = location.width
        found = self._known.get((width, location.shard))
        if found is None:
            have = width // self.size
            if have * self.size != width or (have != self.count and (location.shard < 0 or self.count % max(1, have))):
                raise ValueError(f"{self.count} heads of {self.size} do not fit values of [{width}]")
            first = 0 if have == self.count else location.shard * have
            chosen = [(head - first, place) for place, head in enumerate(self.heads) if first <= head < first + have]
            device = location.hidden.device
            found = self._known[width, location.shard] = (
                torch.tensor([slot for slot, _ in chosen], dtype=torch.int64, device=device),
                torch.tensor([place for _, place in chosen], dtype=torch.int64, device=device),
            )
        return found


def slots_of(group: Group) -> HeadSlots:
    """The heads that a group's members name, which are the same for all of them."""
    op = group.members[0].op
    count, size = op.head_size
    return HeadSlots(range(count) if op.heads is None else op.heads, count, size)


def replace_heads(
    location: LocationValues, rows: Rows, slots: HeadSlots, new: torch.Tensor | None, keep: float | torch.Tensor
) -> None:
    """Write `new + keep * (old - new)` to heads of some rows, in place.

    Args:
        location: the values.
        rows: the rows.
        slots: the heads.
        new: float32 `[rows or 1, heads, size]`; `None` for zero.
        keep: a number, or `[rows]`.
    """
    places, among = slots.here(location)
    if not len(places):
        return
    amount = keep if isinstance(keep, float) else column(column(keep))

    def change(found: torch.Tensor) -> torch.Tensor:
        made = found.clone().view(len(found), -1, slots.size)
        old = made.index_select(1, places).float()
        if new is None:
            changed = old * amount
        else:
            mine = new.index_select(1, among).expand_as(old)
            # By `lerp`, an amount of 0 is exactly the new value, and one of 1 exactly the old one.
            changed = mine if isinstance(amount, float) and amount == 0.0 else torch.lerp(mine, old, amount)
        made.index_copy_(1, places, changed.to(made.dtype))
        return made.view(found.shape)

    rows.put(location.hidden, change)


class HeadReadGroup(ReadGroup):
    """Reads for a `HeadProbe`."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        self._slots = slots_of(self)

    def run(self, location: LocationValues) -> None:
        places, _ = self._slots.here(location)
        rows = location.values(self.rows, residual=False)
        values = rows.reshape(len(rows), -1, self._slots.size).index_select(1, places)
        if getattr(self.one, "reduce", "none") == "norm":
            values = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        assert self.collector is not None
        self.collector.found[self.site] = values


class HeadAblateGroup(Group):
    """Edits for a `HeadAblate`, in place."""

    edits = True
    by_head = True

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        self._slots = slots_of(self)
        heads, size = len(self._slots.heads), self._slots.size
        #: float32 `[rows or 1, heads, size]`.
        self._mean = None if self.matrix is None else self.matrix.reshape(-1, heads, size)

    def run(self, location: LocationValues) -> None:
        replace_heads(location, self.rows, self._slots, self._mean, self.numbers[0])
        location.edited()
