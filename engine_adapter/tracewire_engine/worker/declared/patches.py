"""Patches of several requests that run together at one location, and what prompts keep for patches of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .groups import Group, LocationValues, Rows, column, spread
from .heads import replace_heads, slots_of
from .members import Member, Members
from .ops import Op

__all__ = ["KeepGroup", "PatchGroup"]


class KeepGroup(Group):
    """Keeps the values of a prompt's rows for the patches of the trace's other prompts."""

    #: It runs in steps of prompts only.
    steady = False
    #: Ends the interventions of members' requests with an error.
    fail: Callable[[Iterable[Member], Exception], None]

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        self._slots = slots_of(self) if members[0].op.heads is not None else None

    def run(self, location: LocationValues) -> None:
        values = location.values(self.rows, self.residual)
        if self._slots is not None:
            places, _ = self._slots.here(location)
            values = values.reshape(len(values), -1, self._slots.size).index_select(1, places).flatten(1)
        for member, piece in zip(self.members, values.split(self.rows.counts), strict=True):
            kept = member.op.kept
            assert kept is not None
            if member.declaration.failure is not None:
                continue
            try:
                kept.keep(self.location, member.at, piece)
            except Exception as error:  # such as too many values
                self.fail([member], error)
                kept.clear()


class PatchGroup(Group):
    """Writes the values of `Patch`es to their rows, in place."""

    edits = True

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        #: float32 `[rows, width]`: the new value of each row. It is not spread before the location is reached.
        self._sources = [(member.op, member.at) for member in members]
        self._values: torch.Tensor | None = None
        self._slots = slots_of(self) if members[0].op.heads is not None else None
        self.by_head = self._slots is not None
        self._strength = spread([member.op.numbers[0] for member in members], rows.counts, device)

    def prepare(self) -> None:
        self._spread()

    def run(self, location: LocationValues) -> None:
        values = self._spread()
        if self._slots is not None:
            keep = 1.0 - self._strength
            replace_heads(location, self.rows, self._slots, values.view(len(values), -1, self._slots.size), keep)
            location.edited()
            return
        if values.shape[-1] != location.width:
            raise ValueError(f"values of [{values.shape[-1]}] do not fit values of [{location.width}]")
        if not isinstance(self._strength, float) or self._strength != 1.0:
            # By `lerp`, a strength of 1 is exactly the new value.
            values = torch.lerp(location.values(self.rows, self.residual).float(), values, column(self._strength))
        first, *others = location.halves(self.residual)
        self.rows.put(first, lambda _: values)
        for half in others:
            # So that the sum of the halves is exactly the new value.
            self.rows.put(half, torch.zeros_like)
        location.edited()

    def _spread(self) -> torch.Tensor:
        if self._values is None:
            pieces = [
                _rows(self._matrix(op), at, count)
                for (op, at), count in zip(self._sources, self.rows.counts, strict=True)
            ]
            self._values = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return self._values

    def _matrix(self, op: Op) -> torch.Tensor:
        """A patch's values, a row for each position or one for all of them."""
        found = op.matrix if op.kept is None else op.kept.rows(self.location)
        assert found is not None
        return found


def _rows(matrix: torch.Tensor, at: int, count: int) -> torch.Tensor:
    return matrix.expand(count, -1) if len(matrix) == 1 else matrix[at : at + count]
