"""Arrays of one step, in host memory.

What is encoded must be in host memory. On a GPU a `HostCopy` copies each device tensor once, when it is first asked
for, and answers for it from then on. In host memory nothing needs copying: a value is read where it lies when it is
encoded, at the end of its own step.
"""

from __future__ import annotations

from typing import Any

import torch

from tracewire_bus.values import MAX_DEPTH, Unsavable

__all__ = ["HostCopy"]


class HostCopy:
    """Maps a saved value to one whose tensors are all in host memory."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not torch.cuda.is_available():
            return value
        return self._local(value, 0)

    def _local(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                return value
            copy = self._copies.get(id(value))
            if copy is None:
                copy = self._copies[id(value)] = value.detach().cpu()
            return copy
        if depth > MAX_DEPTH:
            raise Unsavable((), f"containers nest deeper than {MAX_DEPTH} or refer to themselves")
        if type(value) is list:
            return [self._local(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self._local(item, depth + 1) for item in value)
        if type(value) is dict:
            return {key: self._local(item, depth + 1) for key, item in value.items()}
        return value
