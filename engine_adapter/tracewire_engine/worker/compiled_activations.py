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

    def compile(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compile it for tensors like `x`, and call it. Returns `None` if it cannot be compiled."""
        torch._dynamo.mark_dynamic(x, 0)
        try:
            value = self.call(x)
            self.call(x[:1])
        except Exception as error:  # of any part of the compiler
            logger.warning("the model's activations are not compiled, which costs some speed: %r", error)
            self.failed = True
            return None
        return value


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
        form = x.dtype, x.shape[1:], x.stride(), x.device, x.is_inference(), torch.is_inference_mode_enabled()
        if form == self._form:
            return self._function.call(x)
        if self._form is None and not self._function.failed and len(x) >= _FEWEST:
            value = self._function.compile(x)
            if value is not None:
                self._form = form
                return value
        own: torch.Tensor = self._original(x)
        return own
