"""The kernel that waits compiles for a GPU, and looks at the memory and at the clock. `tests.gpu_visits` runs it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tracewire_engine.worker.block_host import hold_kernel

source = ASTSource(hold_kernel._kernel, {"flags": "*i64", "number": "i32", "limit_ns": "i64"})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_the_kernel_looks_again_and_again_and_for_a_limited_time() -> None:
    outcome = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    loop = outcome.stdout.partition("globaltimer")[2]
    assert "ld.volatile.global" in loop
    assert "globaltimer" in loop
    assert "st.global" in loop
