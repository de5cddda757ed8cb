"""Lets vLLM do on a CPU what it does on GPUs only.

For tests only, in processes whose PYTHONPATH begins with this folder.

- `TRITON_INTERPRET=1`: the second model runner runs, with Triton's kernels by Triton's interpreter. vLLM takes Triton
  on a CPU only if Triton has a backend of the name "cpu", which comes with a fork of Triton. The interpreter needs no
  backend, so the entry that is made here compiles nothing.
- `TRACEWIRE_TEST_AHEAD=1`: asynchronous scheduling is what the engine's options say. vLLM turns it off on CPUs.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class _Changing(MetaPathFinder):
    """Has a module changed once it is imported."""

    def __init__(self, name, change):
        self._name, self._change = name, change
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def changed(module):
            load(module)
            self._change(module)

        spec.loader.exec_module = changed
        return spec


if os.environ.get("TRACEWIRE_TEST_AHEAD") == "1":
    from as_told import leave_scheduling

    # vLLM's platform of CPUs leaves asynchronous scheduling as it is.
    _Changing("vllm.platforms.cpu", lambda module: leave_scheduling(module.CpuPlatform, setattr))

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

    # In the interpreter, the loops of the kernel for top-k and top-p count in numbers of Python, which it cannot use.
    _Changing("vllm.v1.sample.ops.topk_topp_sampler", lambda module: setattr(module, "HAS_TRITON", False))
