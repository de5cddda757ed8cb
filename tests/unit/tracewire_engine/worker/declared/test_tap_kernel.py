"""The kernel in Triton against the same in PyTorch's operations, by Triton's interpreter, which needs no GPU.

The interpreter rounds to bfloat16 in a way of its own: `tests.gpu_taps` compares that on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import itertools, torch
from tracewire_engine.worker.declared import tap_kernel, tap_rows

torch.manual_seed(0)
for width, dtype, halves in itertools.product((8, 1500), (torch.float16, torch.float32), (False, True)):
    rows = 40
    hidden, residual = torch.randn(18, width, dtype=dtype), torch.randn(18, width, dtype=dtype)
    pool = torch.randn(5, width)
    flags, places = torch.arange(rows, dtype=torch.int32) % 16, torch.arange(rows, dtype=torch.int32) % 5
    found = []
    for serve in (tap_kernel.serve_rows, tap_rows.serve_rows):
        value, buffer = hidden.clone(), torch.full((rows, width), 7, dtype=dtype)
        serve(value, residual if halves else None, buffer, pool, flags, places)
        found.append((value, buffer))
    assert torch.equal(found[0][0], found[1][0]), (width, dtype, halves, "value")
    assert torch.equal(found[0][1], found[1][1]), (width, dtype, halves, "buffer")
    assert not torch.equal(found[0][0], hidden)
print("equal")
"""


def test_the_kernel_does_what_the_operations_do() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    outcome = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert (outcome.stdout, outcome.returncode) == ("equal\n", 0), outcome.stderr[-3000:]
