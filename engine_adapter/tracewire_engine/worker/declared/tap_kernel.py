"""The kernel that serves a tap within a CUDA graph, in Triton. `tap_rows.py` says what it does with each row.

Rows without flags cost it no memory traffic.
"""

import torch
import triton
import triton.language as tl

__all__ = ["serve_rows"]

#: Features that one program of the kernel handles.
_BLOCK = tl.constexpr(1024)


def serve_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    buffer: torch.Tensor,
    pool: torch.Tensor,
    flags: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Serve a tap, as `tap_rows.serve_rows` does. All tensors are contiguous."""
    width = hidden.shape[1]
    _kernel[hidden.shape[0], triton.cdiv(width, _BLOCK.value)](
        hidden,
        hidden if residual is None else residual,
        buffer,
        pool,
        flags,
        places,
        width=width,
        halves=residual is not None,
    )


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    hidden,
    residual,
    buffer,
    pool,
    flags,
    places,
    width: tl.constexpr,
    halves: tl.constexpr,
):
    # The numbers are the flags of `tap_rows`.
    row = tl.program_id(0)
    flag = tl.load(flags + row)
    columns = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = columns < width
    # Compared as vectors: the interpreter has no masks of a scalar and a vector.
    flags_of = tl.full([_BLOCK], 0, tl.int32) + flag
    reads, sums = inside & ((flags_of & 1) != 0), inside & ((flags_of & 2) != 0)
    adds, late = inside & ((flags_of & 4) != 0), inside & ((flags_of & 8) != 0)
    at = row.to(tl.int64) * width + columns
    before = tl.load(hidden + at, mask=reads | adds, other=0.0)
    place = tl.load(places + row).to(tl.int64)
    vector = tl.load(pool + place * width + columns, mask=adds, other=0.0)
    after = (before.to(tl.float32) + vector).to(before.dtype)
    tl.store(hidden + at, after, mask=adds)
    found = tl.where(late, after, before)
    if halves:
        other = tl.load(residual + at, mask=sums, other=0.0)
        found = tl.where(sums, (found.to(tl.float32) + other.to(tl.float32)).to(found.dtype), found)
    tl.store(buffer + at, found, mask=reads)
