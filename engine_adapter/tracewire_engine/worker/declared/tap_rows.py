"""What a tap's kernel does with each row of the tap's value, in PyTorch's operations.

For each row, it does what the row's flags say: it adds a vector of a pool to the row, and copies the row to a buffer,
before or after that. A copy can be the sum of both halves of a residual stream.
"""

from __future__ import annotations

import torch

__all__ = ["ADD", "AFTER", "READ", "SUM", "serve_rows"]

#: A row's flags: copy the row; copy the sum of both halves of a residual stream; add a vector; copy after that.
READ, SUM, ADD, AFTER = 1, 2, 4, 8


def serve_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    buffer: torch.Tensor,
    pool: torch.Tensor,
    flags: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Serve a tap.

    Args:
        hidden: the tap's value `[n, hidden]`, which is changed in place.
        residual: the other half of a residual stream `[n, hidden]`, if there is one.
        buffer: `[rows, hidden]`, of the same dtype. Row `i` of the value goes to row `i`.
        pool: the vectors `[vectors, hidden]`, float32.
        flags: of each row, int32 `[rows]`.
        places: of the vector of each row in the pool, int32 `[rows]`.
    """
    count = hidden.shape[0]
    flag = flags[:count].unsqueeze(-1)
    before = hidden.clone()
    added = (before.float() + pool[places[:count].long()]).to(before.dtype)
    after = torch.where((flag & ADD) != 0, added, before)
    hidden.copy_(after)
    found = torch.where((flag & AFTER) != 0, after, before)
    if residual is not None:
        found = torch.where((flag & SUM) != 0, found + residual, found)
    buffer[:count] = torch.where((flag & READ) != 0, found, buffer[:count])
