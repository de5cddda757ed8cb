"""Groups of lenses with maps, subspaces, features and controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch

from tracewire_engine.worker.parallel.rank_agreement import RanksDiffer

from .conditions import Signals, on_device
from .device_autoencoder import DeviceAutoencoder, Gather
from .groups import EditGroup, Group, LocationValues, ReadGroup, Rows, along, column, project
from .members import Member, Members

__all__ = [
    "CoordinatesGroup",
    "FeatureGroup",
    "FeaturesGroup",
    "HoldGroup",
    "LensGroup",
    "ProjectGroup",
    "SteerFeaturesGroup",
]

Add: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a tensor of all ranks."""


class LensGroup(ReadGroup):
    """Reads for a `Lens`: residual streams, mapped."""

    shares_vectors = True

    def read(self, values: torch.Tensor) -> torch.Tensor:
        assert self.matrix is not None
        stream = values.float()
        mapped = stream @ self.matrix[self._place(self.matrix)].T
        if self.bias is not None:
            mapped = mapped + self.bias[self._place(self.bias)]
        return (stream + mapped if self.one.add else mapped).to(values.dtype)

    def _place(self, maps: torch.Tensor) -> int:
        return self.site if len(maps) > 1 else 0


class CoordinatesGroup(ReadGroup):
    """Reads for `Coordinates`."""

    def read(self, values: torch.Tensor) -> torch.Tensor:
        assert self.matrix is not None
        return project(values.float(), self.matrix)


class ProjectGroup(EditGroup):
    """Edits for a `Project`."""

    def _delta(self, location: LocationValues) -> torch.Tensor:
        assert self.matrix is not None
        values = location.values(self.rows, self.residual).float()
        inside = along(project(values, self.matrix), self.matrix)
        return (-inside if self.one.remove else inside - values) * column(self.numbers[0])


class FeatureGroup(Group):
    """Base of the groups with an autoencoder, which is the same for all members."""

    #: What gets the tensors of all ranks, for an autoencoder that is split over them. Set when the plan is made.
    gather: Gather | None = None

    @property
    def sae(self) -> DeviceAutoencoder:
        """The autoencoder."""
        found = self.members[0].op.autoencoder
        assert found is not None
        return found

    def across(self, rank: int, add: Add | None, agree: Callable[[Iterable[Member]], bool]) -> None:
        """Have the group exchange with other ranks: `add` adds up a tensor of all ranks, if they `agree` to do so."""
        if self.sae.ranks > 1 and add is not None:
            self.gather = partial(_gathered, self.members, rank, self.sae.ranks, add, agree)

    def chosen(self, stream: torch.Tensor) -> torch.Tensor:
        """The activations of the members' features, `[rows, features]`, of float32 values."""
        for member in self.members:
            if member.op.choice is not None:
                member.op.choice.complete(self.gather)
        assert self.matrix is not None
        assert self.bias is not None
        count = self.bias.shape[-2]
        return self.sae.of_chosen(project(stream, self.matrix[..., :count, :]), self.bias, stream, self.gather)


def _gathered(
    members: Members, rank: int, ranks: int, add: Add, agree: Callable[[Iterable[Member]], bool], mine: torch.Tensor
) -> torch.Tensor:
    """The tensors of all ranks: `[ranks, ...]`."""
    found = mine.new_zeros(ranks, *mine.shape)
    found[rank] = mine
    # Behind all that may fail on one rank alone.
    if not agree(members):
        raise RanksDiffer("the ranks do not all use the features of this autoencoder in this step")
    return add(found)


class FeaturesGroup(FeatureGroup, ReadGroup):
    """Reads for a `Features`: the activations of chosen features, or the greatest ones with their features."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        chosen = self.one.indices is not None
        self.recordable = not self.sae.streams(chosen=chosen) and not self.sae.exchanges(chosen=chosen)

    def read(self, values: torch.Tensor) -> torch.Tensor:
        if self.one.indices is not None:
            return self.chosen(values.float())
        activations, features = self.sae.greatest(values.float(), self.one.top_k, self.gather)
        found = activations > column(self.numbers[0])
        # Features are whole numbers below 2 ** 24, which float32 holds exactly.
        return torch.stack([torch.where(found, features.float(), -1.0), torch.where(found, activations, 0.0)], -1)


class SteerFeaturesGroup(FeatureGroup, EditGroup):
    """Edits for a `SteerFeatures`."""

    def __init__(self, members: Members, rows: Rows, residual: bool, device: torch.device) -> None:
        super().__init__(members, rows, residual, device)
        self.recordable = not self.sae.streams(chosen=True) and not self.sae.exchanges(chosen=True)

    def _delta(self, location: LocationValues) -> torch.Tensor:
        now = self.chosen(location.values(self.rows, self.residual).float())
        add, scale, low, high = map(column, self.numbers)
        assert self.matrix is not None
        return along(_bounded(now * scale + add, low, high) - now, self.matrix[..., now.shape[-1] :, :])


class HoldGroup(EditGroup):
    """Edits for a `Hold`. The strengths are reads, too."""

    #: Set when the plan is made.
    signals: Signals

    def begin(self, signals: Signals) -> None:
        """Find the members' slots, and the last row of each."""
        device, counts = signals.device, self.rows.counts
        self.signals = signals
        controls = np.array([one.declaration.controls[one.place] for one in self.members], np.int64)
        self._values, self._states = (
            on_device(torch.from_numpy(np.ascontiguousarray(slots)), device) for slots in controls.T
        )
        self._owners = on_device(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), device)
        self._lasts = on_device(torch.from_numpy(np.cumsum(counts) - 1), device)

    def run(self, location: LocationValues) -> None:
        self._run(location, None)

    def run_where(self, location: LocationValues, mask: torch.Tensor) -> None:
        self._run(location, mask)

    def _run(self, location: LocationValues, mask: torch.Tensor | None) -> None:
        assert self.matrix is not None
        vector = self.matrix[..., 0, :]
        if location.width != vector.shape[-1]:
            raise ValueError(f"a vector of {vector.shape[-1]} does not fit values of [{location.width}]")
        strengths = self._exact(location, vector) if self.one.gain is None else self._controlled(mask)
        if mask is not None:
            strengths = torch.where(mask, strengths, 0.0)
        delta = strengths.unsqueeze(-1) * vector
        before = self.rows.take(location.hidden).clone() if mask is not None else None
        self.rows.put(location.hidden, lambda values: values.float() + delta)
        if before is not None and mask is not None:
            self.rows.put(location.hidden, lambda values: torch.where(mask.unsqueeze(-1), values, before))
        location.edited()
        assert self.collector is not None
        self.collector.found[self.site] = strengths.index_select(0, self._lasts)

    def _exact(self, location: LocationValues, vector: torch.Tensor) -> torch.Tensor:
        """The strengths with which the probe's values are the targets, within the bounds: `[rows]`."""
        assert self.bias is not None
        target, low, high, offset = self.numbers
        now = (location.values(self.rows, self.residual).float() * self.bias[..., 0, :]).sum(-1) + offset
        wanted = ((target - now) / self._reach).nan_to_num(0.0)
        return _bounded(wanted, low, high)

    @cached_property
    def _reach(self) -> torch.Tensor:
        """How far one unit of strength moves the probe."""
        assert self.matrix is not None
        assert self.bias is not None
        return (self.matrix[..., 0, :] * self.bias[..., 0, :]).sum(-1)

    def prepare(self) -> None:
        super().prepare()
        _ = self._reach if self.one.gain is None else self._of_members

    def _controlled(self, mask: torch.Tensor | None) -> torch.Tensor:
        """The strengths of this step by the controllers, whose states go on: `[rows]`."""
        target, low, high, gain, proportional = self._of_members
        state = self.signals.states.index_select(0, self._states)
        before, last_error = state.unbind(1)
        error = target - self.signals.values.index_select(0, self._values)
        change = gain * error + torch.where(last_error.isnan(), 0.0, proportional * (error - last_error))
        strength = torch.where(error.isnan(), before, before + change)
        strength = _bounded(strength, low, high)
        after = torch.stack([strength, torch.where(error.isnan(), last_error, error)], 1)
        if mask is not None:
            after = torch.where(mask.index_select(0, self._lasts).unsqueeze(-1), after, state)
        self.signals.states.index_copy_(0, self._states, after)
        return strength.index_select(0, self._owners)

    @cached_property
    def _of_members(self) -> list[float | torch.Tensor]:
        """The numbers of each member, or one for all of them."""
        return [one if isinstance(one, float) else one.index_select(0, self._lasts) for one in self.numbers]


def _bounded(values: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor) -> torch.Tensor:
    """The values within bounds, which are numbers or tensors that go with them."""
    if isinstance(low, float) and isinstance(high, float):
        return values.clamp(low, high)
    return torch.minimum(torch.maximum(values, _like(low, values)), _like(high, values))


def _like(number: float | torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.full_like(other, number) if isinstance(number, float) else number
