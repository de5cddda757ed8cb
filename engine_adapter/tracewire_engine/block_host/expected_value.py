"""What the worker leaves of a value that blocks change, while the blocks do the same to their host's copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["ExpectedValue", "same_values"]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape have the same bytes, but for those of what is no number.

    The sign of such a result depends on how many numbers a processor takes at once.
    """
    if _same_bytes(one, other):
        return True
    if not one.is_floating_point():
        return False
    odd = one.isnan()
    return torch.equal(odd, other.isnan()) and _same_bytes(one.masked_fill(odd, 0), other.masked_fill(odd, 0))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = (of.contiguous().view(-1).view(torch.uint8) for of in (one, other))
    same: bool = torch.equal(left, right)
    return same


class ExpectedValue:
    """A value as the worker leaves it at a location.

    Args:
        pairs: the tensors of the value that blocks are served, each with a tensor as the worker leaves it.
        leave: makes the rows of blocks that are over in the second tensor those of the first one.
    """

    def __init__(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], leave: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        self._pairs, self._leave = pairs, leave

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What the worker leaves of a tensor, once the blocks were served; `None` for one that is not of the value."""
        for one, copy in self._pairs:
            if one is tensor:
                if not same_values(one, copy):
                    self._leave(one, copy)
                return copy
        return None
