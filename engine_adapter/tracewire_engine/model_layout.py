"""Finds a model's decoder layers and its final norm, and whether its layers pass the residual stream separately."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable

import torch

from tracewire_bus.domain.python_source import parse_source

__all__ = ["find_layers", "find_norm", "takes_residual"]

_LAYER_LISTS = re.compile(r"(^|\.)(layers|h|blocks|decoder_layers|block)$")

#: Modules beside or before the language model in a multimodal model.
_TOWERS = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|image\w*|\w*encoder)(\.|$)")


def find_layers(paths: Iterable[tuple[str, torch.nn.Module]], count: int = 0) -> str:
    """The path of the language model's list of decoder layers, or `""`.

    The list is a `ModuleList` with one of the usual names: of `count` layers if that is known, or else the longest.
    """
    best, rank = "", (False, False, 0)
    for path, module in paths:
        if isinstance(module, torch.nn.ModuleList) and _LAYER_LISTS.search(path):
            its = (_TOWERS.search(path) is None, len(module) == count, len(module))
            if its > rank:
                best, rank = path, its
    return best


_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")


def find_norm(model: torch.nn.Module, layers: str) -> torch.nn.Module | None:
    """The norm that the model applies after its decoder layers (which are at `layers`), by one of its usual names."""
    if not layers:
        return None
    parent = model.get_submodule(layers.rpartition(".")[0])
    return next((child for name in _NORMS if isinstance(child := getattr(parent, name, None), torch.nn.Module)), None)


def takes_residual(layers: Iterable[torch.nn.Module]) -> bool:
    """Whether decoder layers use the `residual` that they are given, so that the stream is the sum of two tensors.

    Found in the source of `forward`: whether it uses the argument `residual` before it assigns to the name. Without a
    source, the layers are taken to use it, as those of most models do.
    """
    return any(_takes_residual(kind) for kind in {type(layer) for layer in layers})


def _takes_residual(kind: type[torch.nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    try:
        (function,) = parse_source(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return True
    if not isinstance(function, ast.FunctionDef) or "residual" not in inspect.signature(forward).parameters:
        return False
    for statement in function.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == "residual"]
        if any(isinstance(node.ctx, ast.Load) for node in names):
            return True
        if isinstance(statement, ast.Assign) and names:
            return False
    return False
