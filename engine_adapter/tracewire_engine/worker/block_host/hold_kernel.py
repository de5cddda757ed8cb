"""The kernel that makes a stream wait for a number in the host's memory, in Triton.

The driver's own wait has no limit. This one ends by itself, so that an engine goes on whatever happens to the thread
that releases it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = ["hold"]


def hold(flags: torch.Tensor, number: int, limit_ns: int) -> None:
    """Have the current stream wait until `flags[1]` is at least `number`.

    Args:
        flags: pinned memory, `torch.int64`. If the time is over first, the kernel writes `number` to `flags[3]`.
        number: what to wait for.
        limit_ns: for how long, in nanoseconds.
    """
    _kernel[(1,)](flags, number, limit_ns, num_warps=1)


@triton.jit(do_not_specialize=["number", "limit_ns"])
def _kernel(  # type: ignore[no-untyped-def]
    flags,
    number,
    limit_ns,
):
    began = globaltimer()
    waits = tl.load(flags + 1, volatile=True) < number
    while waits:
        late = globaltimer() - began > limit_ns
        waits = tl.load(flags + 1, volatile=True) < number
        if waits & late:
            tl.store(flags + 3, tl.zeros([], tl.int64) + number)
        waits = waits & (not late)
