"""What a block does to the values of a location, as its source shows it: the worker does it, and a host checks it.

An *edit* is a short program over the value that a request's block is served at a location. Its operations are those of
torch which the block itself would run, in the same order, on the same tensors.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["LIVE_LEAF", "Edit", "Operation"]

#: Stands before the name of a live parameter; no variable is called so.
LIVE_LEAF = ""


class Operation(msgspec.Struct, array_like=True, frozen=True):
    """One operation. It makes a register; the first register, 0, is the value that the block is served.

    `name` is one of `OPERATIONS` of `worker/block_host/edit_runs.py`. An argument is a number, a text, a flag, or one
    of these lists: `["r", register]`, `["v", leaf]` for a value of `Edit.leaves`, `["d", name]` for a dtype of torch,
    `["s", start, stop, step]` for a slice, and `["e"]` for an ellipsis.
    """

    name: str
    arguments: list[Any]
    options: dict[str, Any] = {}

    @property
    def registers(self) -> list[int]:
        """The registers that it takes."""
        given = [*self.arguments, *self.options.values()]
        return [one[1] for one in given if isinstance(one, list) and one[0] == "r"]


class Edit(msgspec.Struct, array_like=True, frozen=True):
    """What a block does at a location in the steps from its `first` on, before step `end` (`None`: to its last).

    The steps are those of the block's request. `leaves` are values that come with the block: each the name of a
    variable, and the keys that lead to the value in it. Or they are live parameters: `LIVE_LEAF`, and the name.
    """

    location: str
    operations: list[Operation]
    leaves: list[list[Any]] = []
    first: int = 0
    end: int | None = None
