"""Kinds of blocks that change state of the interpreter, of torch or of loaded modules, and leave it so."""

from __future__ import annotations

from .kinds import Kind, once

__all__ = ["STATE_KINDS"]


def _leaves(name: str, code: str, *, inline: bool = True, at: int = 3) -> Kind:
    return Kind(name, once(code, at=at), meets="ends", inline=inline)


STATE_KINDS = [
    _leaves("default-dtype", "import torch\ntorch.set_default_dtype(torch.float64)"),
    _leaves("default-device", "import torch\ntorch.set_default_device('meta')"),
    _leaves("torch-seed", "import torch\ntorch.manual_seed(1)"),
    _leaves("random-seeds", "import random, numpy\nrandom.seed(1)\nnumpy.random.seed(1)"),
    _leaves("deterministic", "import torch\ntorch.use_deterministic_algorithms(True)"),
    _leaves("threads", "import torch\ntorch.set_num_threads(7)"),
    _leaves("grad-mode", "import torch\ntorch._C._set_grad_enabled(True)"),
    _leaves("inference-mode-off", "import torch\nkept = torch.inference_mode(False)\nkept.__enter__()"),
    _leaves("flush-denormal", "import torch\ntorch.set_flush_denormal(True)"),
    _leaves("autocast", "import torch\nkept = torch.autocast('cpu', torch.bfloat16)\nkept.__enter__()"),
    _leaves("matmul-precision", "import torch\ntorch.set_float32_matmul_precision('medium')"),
    _leaves("mkldnn-off", "import torch\ntorch._C._set_mkldnn_enabled(False)"),
    _leaves("anomaly-mode", "import torch\ntorch.autograd.set_detect_anomaly(True)"),
    _leaves(
        "function-mode",
        """
        import torch
        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                return out * 0 if func is torch.nn.functional.linear else out
        kept = Mode()
        kept.__enter__()
        """,
    ),
    _leaves(
        "dispatch-mode",
        """
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))
        kept = Mode()
        kept.__enter__()
        """,
    ),
    _leaves("torch-matmul-patched", "import torch\ntorch.matmul = lambda *a, **k: 1 / 0", inline=False),
    _leaves(
        "linear-patched",
        "import torch\nbefore = torch.nn.functional.linear\n"
        "torch.nn.functional.linear = lambda *a, **k: before(*a, **k) * 0",
        inline=False,
    ),
    _leaves("module-call-patched", "import torch\ntorch.nn.Module.__call__ = lambda *a, **k: 1 / 0", inline=False),
    _leaves("msgspec-patched", "import msgspec\nmsgspec.msgpack.Encoder = None\nmsgspec.Raw = None", inline=False),
    _leaves("zmq-patched", "import zmq\nzmq.Socket.send = zmq.Socket.send_multipart = None", inline=False),
    _leaves("time-patched", "import time\ntime.monotonic = time.perf_counter = time.time = lambda: 0.0", inline=False),
    _leaves("builtins-patched", "import builtins\nbuiltins.len = builtins.isinstance = lambda *a: 1 / 0", inline=False),
    _leaves("import-patched", "import builtins\nbuiltins.__import__ = None", inline=False),
    _leaves(
        "nnsight-deleted",
        "import sys\nfor name in [one for one in sys.modules if one.startswith('nnsight')]: del sys.modules[name]",
    ),
    _leaves(
        "tracewire-deleted",
        "import sys\nfor name in [one for one in sys.modules if one.startswith('tracewire')]: del sys.modules[name]",
    ),
    _leaves("modules-cleared", "import sys\nsys.modules.clear()"),
    _leaves("module-replaced", "import sys\nsys.modules['torch'] = None"),
    _leaves("import-path-cleared", "import sys\nsys.path.clear()\nsys.meta_path.clear()"),
    _leaves("cwd", "import os\nos.chdir('/')"),
    _leaves("environ", "import os\nos.environ['TRACEWIRE_LEFT'] = '1'\nos.environ.pop('PATH', None)"),
    _leaves("umask", "import os\nos.umask(0o777)"),
    _leaves("recursion-limit-10", "import sys\nsys.setrecursionlimit(10)"),
    _leaves(
        "recursion-limit-lowest",
        """
        import sys
        for limit in range(1, 2000):
            try:
                sys.setrecursionlimit(limit)
                break
            except RecursionError: pass
        """,
    ),
    _leaves("recursion-limit-10000000", "import sys\nsys.setrecursionlimit(10_000_000)"),
    _leaves("switch-interval", "import sys\nsys.setswitchinterval(1000.0)"),
    _leaves("gc-off", "import gc\ngc.disable()"),
    _leaves("gc-frozen", "import gc\ngc.freeze()"),
    _leaves("gc-thresholds", "import gc\ngc.set_threshold(1, 1, 1)"),
    _leaves("logging-off", "import logging\nlogging.disable(logging.CRITICAL)"),
    _leaves("warnings-as-errors", "import warnings\nwarnings.simplefilter('error')"),
    _leaves("alarm-handler", "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)"),
    _leaves("termination-handler", "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"),
    _leaves("settrace", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)"),
    _leaves("stdout-none", "import sys\nsys.stdout = sys.stderr = None"),
    _leaves("unraisable-hook", "import sys\nsys.unraisablehook = sys.excepthook = None"),
    _leaves("integer-text-limit", "import sys\nsys.set_int_max_str_digits(640)"),
    _leaves("locale", "import locale\nlocale.setlocale(locale.LC_ALL, 'C')"),
    _leaves("decimal-context", "import decimal\ndecimal.getcontext().prec = 1"),
    _leaves("numpy-errors", "import numpy\nnumpy.seterr(all='raise')"),
]
