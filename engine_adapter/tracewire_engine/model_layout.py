"""Finds a model's decoder layers, their attention heads and the final norm, and how layers pass the residual stream."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import torch

from tracewire_bus.domain.python_source import parse_source
from tracewire_bus.wire.messages import AttentionInfo

__all__ = ["find_attention", "find_layers", "find_norm", "takes_residual"]

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


def find_attention(model: torch.nn.Module, layers: str) -> list[AttentionInfo]:
    """The attention heads of the decoder layers (which are at `layers`), of a model as one rank has it.

    A layer's heads are found where the layer has one of vLLM's `Attention` modules, and beside it one row-parallel
    projection that takes the heads, side by side. Layers of another kind are left out: several attentions (as with
    encoders), latent attention, recurrent layers, and attention that a library computes outside the layer.
    """
    found = []
    for index, layer in enumerate(model.get_submodule(layers) if layers else ()):
        attentions = [(path, one) for path, one in layer.named_modules() if _is_attention(one)]
        if len(attentions) != 1:
            continue
        ((path, attention),) = attentions
        heads, size = int(attention.num_heads), int(getattr(attention, "head_size_v", attention.head_size))
        parent = path.rpartition(".")[0]
        outputs = [
            name
            for name, child in layer.get_submodule(parent).named_children()
            if getattr(child, "input_is_parallel", False) and getattr(child, "input_size", 0) == heads * size
        ]
        if len(outputs) == 1:
            above = f"{layers}.{index}." + (f"{parent}." if parent else "")
            found.append(
                AttentionInfo(
                    layer=index,
                    module=f"{layers}.{index}.{path}",
                    output=above + outputs[0],
                    heads=heads,
                    kv_heads=int(attention.num_kv_heads),
                    head_size=size,
                    opaque=_opaque(attention),
                )
            )
    return found


def _opaque(attention: Any) -> str:
    """Why the pattern of a module of vLLM's attention cannot be computed from its queries and keys; `""` if it can."""
    impl = getattr(attention, "impl", None)
    if not isinstance(getattr(impl, "scale", None), float):
        return "its kernel does not say by what it scales the scores"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "it adds biases by distance (ALiBi) to the scores"
    if getattr(impl, "sinks", None) is not None or getattr(attention, "has_sink", False):
        return "it has attention sinks beside the positions"
    if getattr(attention, "kv_sharing_target_layer_name", None):
        return "it uses the keys of another layer"
    kind = getattr(attention, "attn_type", "decoder")
    if getattr(kind, "value", kind) != "decoder":
        return "it is not a decoder's attention"
    dtype = str(getattr(attention, "kv_cache_dtype", "auto"))
    if dtype not in ("auto", "bfloat16", "float16", "float32", "half"):
        return f"it reads keys that were rounded to {dtype} in the KV cache"
    return ""


def _is_attention(module: Any) -> bool:
    """Whether a module is vLLM's attention of a decoder, with keys and values of its own per head."""
    named = all(hasattr(module, name) for name in ("num_heads", "num_kv_heads", "head_size", "kv_cache"))
    return named and type(module).__name__ == "Attention"


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
