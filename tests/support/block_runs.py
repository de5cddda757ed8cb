"""Runs a captured block as a worker compiles and binds it, without a model and without nnsight."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_engine.worker.blocks import block_names
from tracewire_engine.worker.blocks.compiled_source import CompiledSource
from tracewire_engine.worker.tensors import to_tensors

__all__ = ["run"]


def run(block: Block, model: Any = None) -> dict[str, Any]:
    """What the block's scope holds at its end. A module of the model stands as its path."""
    compiled = CompiledSource(block, "test")
    scope: dict[str, Any] = {"__name__": block_names.__name__}
    for name, module in block.modules.items():
        scope[name] = importlib.import_module(module)
    for name, (module, path) in block.imports.items():
        scope[name] = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    scope.update(block.paths)
    scope.update(zip(block.parameters, (model, None, None), strict=True))
    scope.update(to_tensors(unpack(block.variables), torch.device("cpu")))
    for code in compiled.helpers:
        exec(code, scope)
    exec(compiled.code, scope)
    compiled.forget()
    return scope
