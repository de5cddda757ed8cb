"""Probes with weights at several taps, read from the taps' buffers by one product.

A product of one location's rows takes a GPU as long as it takes to start it. So probes of all layers of a model would
take it as long as some layers of the model do.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Final

import torch

from tracewire_bus.wire.messages import Probe

from .groups import ReadGroup, scored
from .tap_buffers import TapBuffers

__all__ = ["JoinedProbes", "join_probes", "read_joined"]

logger = logging.getLogger("vllm.tracewire")

#: Bytes of values in float32 that one product takes at most, and of all weights of probes that are read together.
_AT_ONCE: Final = 32 << 20
_MOST_WEIGHTS: Final = 64 << 20


class JoinedProbes:
    """Groups of probes that differ in their locations and weights alone.

    Args:
        groups: at least one. Their collectors get what is read.
    """

    def __init__(self, groups: list[ReadGroup]) -> None:
        self.groups = groups
        self.ids = frozenset(map(id, groups))

    def prepare(self) -> None:
        """Put the weights on the device: what records the product must not make them."""
        _ = self._matrix, self._bias

    @cached_property
    def _matrix(self) -> torch.Tensor:
        """The weights: `[taps, k, hidden]`, or `[taps, rows, k, hidden]` if each row has its own."""
        return torch.stack([group.matrix for group in self.groups if group.matrix is not None])

    @cached_property
    def _bias(self) -> torch.Tensor | None:
        """What is added behind them: `[taps, 1 or rows, k]`."""
        found = [group.bias for group in self.groups if group.bias is not None]
        if not found:
            return None
        bias = torch.stack(found)
        return bias.unsqueeze(1) if bias.dim() == 2 else bias

    def read(self, buffers: TapBuffers) -> None:
        """Read all groups' rows."""
        rows, matrix, one = self.groups[0].rows, self._matrix, self.groups[0].one
        values = buffers.of_taps([group.location for group in self.groups])
        values = values[:, : rows.total] if rows.index is None else values.index_select(1, rows.index)
        pieces = []
        # Weights of each row are multiplied with its values one by one.
        taps = max(1, _AT_ONCE // (4 * values[0].numel() * (matrix.shape[2] if matrix.dim() == 4 else 1)))
        for some, weights in zip(values.split(taps), matrix.split(taps), strict=True):
            if weights.dim() == 3:
                pieces.append(torch.bmm(some.float(), weights.transpose(1, 2)))
            else:
                pieces.append(torch.linalg.vecdot(some.float().unsqueeze(2), weights))
        found = scored(one, torch.cat(pieces) if len(pieces) > 1 else pieces[0], self._bias)
        for group, read in zip(self.groups, found, strict=True):
            assert group.collector is not None
            group.collector.found[group.site] = read


def join_probes(groups: Iterable[object], buffers: TapBuffers) -> list[JoinedProbes]:
    """The probes among the groups of a plan that can be read together. A probe that has none beside it is left out."""
    alike: dict[Hashable, list[ReadGroup]] = {}
    for group in groups:
        if type(group) is not ReadGroup:
            continue
        try:
            key = _key(group, buffers.width)
        except Exception:  # its vectors do not fit the device: it is served by itself, and fails there
            logger.exception("the probes of a location cannot be read with others")
            continue
        if key is not None:
            alike.setdefault(key, []).append(group)
    return [
        JoinedProbes(sorted(found, key=lambda group: buffers.place(group.location)))
        for found in alike.values()
        if len(found) > 1 and sum(group.matrix.nbytes for group in found if group.matrix is not None) <= _MOST_WEIGHTS
    ]


def _key(group: ReadGroup, width: int) -> Hashable | None:
    """What groups have in common that can be read together; `None` if this one is read by itself."""
    one = group.one
    if not isinstance(one, Probe) or group.matrix is None or group.matrix.shape[-1] != width:
        return None
    if group.condition is not None or group.watch is not None:
        return None
    # The mean of one row is the row.
    if one.reduce == "mean" and not group.rows.single:
        return None
    shapes = group.matrix.shape, None if group.bias is None else group.bias.shape
    return id(group.rows), group.residual, group.members[0].op.key, shapes


def read_joined(joined: list[JoinedProbes], buffers: TapBuffers) -> frozenset[int]:
    """Read what can be read together. Returns the ids of the groups that have been read.

    What cannot be is taken out of `joined`: each of its groups is then read by itself, and fails by itself.
    """
    done: frozenset[int] = frozenset()
    for one in list(joined):
        try:
            one.read(buffers)
        except Exception:  # such as out of memory
            logger.exception("probes of several layers could not be read together")
            joined.remove(one)
            continue
        done |= one.ids
    return done
