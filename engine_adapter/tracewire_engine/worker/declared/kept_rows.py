"""Values of one prompt of a trace that patches of its other prompts take.

The adapter starts a prompt that takes such values when the prompt that gives them has been computed. The values stay on
the device until the adapter says that the trace is over (`DeclaredRequests.forget`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

__all__ = ["MOST_BYTES", "KeptRows", "KeptStore"]

#: Most bytes of such values on a worker.
MOST_BYTES: Final = 1 << 30


class KeptRows:
    """What one patch takes: by location, pieces of rows in the model's dtype, each by the place of its first row.

    `left` returns how many bytes more all of them may have.
    """

    def __init__(self, left: Callable[[], int]) -> None:
        self._left = left
        self._pieces: dict[str, dict[int, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the values on the device."""
        return sum(int(piece.nbytes) for pieces in self._pieces.values() for piece in pieces.values())

    def keep(self, location: str, place: int, rows: torch.Tensor) -> None:
        """Take `rows`, `[rows, width]`. The first that come stay: a preempted prompt is computed again.

        Raises:
            ValueError: there is no room for them.
        """
        pieces = self._pieces.setdefault(location, {})
        if place in pieces:
            return
        left = self._left()
        if rows.nbytes > left:
            raise ValueError(
                f"the values that other prompts take need {rows.nbytes} bytes, and {left} are left for them; "
                "name fewer positions or locations"
            )
        pieces[place] = rows.clone()

    def clear(self) -> None:
        """Drop the values: the request that gives them has failed."""
        self._pieces.clear()

    def rows(self, location: str) -> torch.Tensor:
        """The rows of a location in order, float32 `[rows, width]`.

        Raises:
            ValueError: none were kept.
        """
        pieces = self._pieces.get(location)
        if not pieces:
            raise ValueError("the prompt whose values it takes was not computed here")
        return torch.cat([pieces[place] for place in sorted(pieces)]).float()


class KeptStore:
    """The values of all traces on a worker, by the name of the trace's run and the place of the patch."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], KeptRows] = {}

    def of(self, run: str, place: int) -> KeptRows:
        """The values of one patch."""
        return self._kept.setdefault((run, place), KeptRows(self._left))

    def _left(self) -> int:
        """How many bytes more may be kept."""
        return MOST_BYTES - sum(one.nbytes for one in self._kept.values())

    def forget(self, run: str) -> None:
        """Drop the values of a run that is over."""
        for key in [key for key in self._kept if key[0] == run]:
            del self._kept[key]
