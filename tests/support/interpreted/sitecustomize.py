"""Lets vLLM's second model runner run on a CPU: Triton's kernels by Triton's interpreter.

For tests only, in processes whose PYTHONPATH begins with this folder. vLLM takes Triton on a CPU only if Triton has a
backend of the name "cpu", which comes with a fork of Triton. The interpreter needs no backend, so the entry that is
made here compiles nothing.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class _Driver(DriverBase):
        """Says that it is there."""

        @staticmethod
        def is_active() -> bool:
            return True

    _Driver.__abstractmethods__ = frozenset()
    backends.setdefault("cpu", Backend(compiler=BaseBackend, driver=_Driver))

    # The interpreter loads and stores under masks of booleans only. Some of vLLM's kernels combine masks to numbers.
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def _boolean(mask: TensorHandle) -> TensorHandle:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    _load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *rest: _load(self, ptrs, _boolean(mask), *rest)
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *rest: _store(
        self, ptrs, value, _boolean(mask), *rest
    )
