"""Compiles the activations of a model with taps, as plain vLLM compiles the whole model.

vLLM does not compile a model with taps, since nnsight's hooks run between its modules. Such a model computes its
activations by vLLM's own kernel, which takes twice as long as a compiled one (docs/performance.md). So the worker
compiles them, each kind by itself, from vLLM's definition in PyTorch. Both come to the same values, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul

__all__ = ["compile_activations"]

logger = logging.getLogger("vllm.tracewire")

#: For fewer tokens than these, an activation is not compiled yet: the compiler lays its kernel out for about as many as
#: it is first given. vLLM first gives it a whole step.
_FEWEST = 16
#: How many rows of an activation are compared with those of vLLM's kernel when it is compiled.
_COMPARED = 64


def compile_activations(model: torch.nn.Module, compiled: Callable[[Any], Any] = torch.compile) -> list[str]:
    """Have the activations of vLLM's model compiled when the model first calls them.

    An activation that cannot be compiled stays as it was.

    Args:
        model: vLLM's.
        compiled: compiles a function.

    Returns:
        The paths of the activations that are compiled.
    """
    found = {path: module for path, module in model.named_modules() if type(module) is SiluAndMul}
    if found:
        function = _Function(compiled(SiluAndMul.forward_native))
        for module in found.values():
            module.__dict__["_forward_method"] = _Compiled(module, function)
    return list(found)


class _Function:
    """What all activations share: the function that is compiled, and whether that has failed."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.call, self.failed = call, False

    def compile(self, x: torch.Tensor, own: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """Compile it for tensors like `x`, and call it. Returns `None` if it does not come to what `own` does."""
        torch._dynamo.mark_dynamic(x, 0)
        try:
            value = self.call(x)
            rows, first = x[:_COMPARED], x[:1]
            same = _same(self.call(rows), own(rows)) and _same(self.call(first), own(first))
            why = "" if same else "it comes to other values than vLLM's"
        except Exception as error:  # of any part of the compiler
            why = repr(error)
        if not why:
            return value
        logger.warning("the model's activations are not compiled, which costs some speed: %s", why)
        self.failed = True
        return None


def _same(value: torch.Tensor, own: torch.Tensor) -> bool:
    return bool(((value == own) | (value.isnan() & own.isnan())).all())


class _Compiled:
    """An activation, compiled by its first call, for one token and for any other number of them.

    A block may call the module with another kind of tensor. Then vLLM's own kernel computes it: compiling for that one,
    too, would take seconds.
    """

    def __init__(self, module: Any, function: _Function) -> None:
        self._function, self._original = function, module._forward_method
        #: Of the tensors for which it is compiled.
        self._form: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        form = _form(x)
        if form is not None and form == self._form:
            return self._function.call(x)
        if self._form is None and not self._function.failed and len(x) >= _FEWEST and not _is_recorded(x):
            value = self._function.compile(x, self._original)
            if value is not None:
                self._form = form
                return value
        own: torch.Tensor = self._original(x)
        return own


def _form(x: torch.Tensor) -> Any:
    """All for which PyTorch would compile anew, but the number of tokens; `None` if there are none."""
    if not len(x):
        return None
    tensor = type(x), x.dtype, x.shape[1:], x.stride(), x.device, x.requires_grad, x.is_inference()
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
    # A block may have changed these, or entered a `with torch.device(...)`.
    rest = torch.get_default_dtype(), torch.get_num_threads(), torch._C._len_torch_function_stack()
    return tensor, modes, rest


def _is_recorded(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing can be compiled."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())
