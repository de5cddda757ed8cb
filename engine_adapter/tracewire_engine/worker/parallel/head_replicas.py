"""Copies the final norm and the head to every pipeline stage, so that a block can apply them at any layer.

A logit lens calls modules that only the last stage has, on values of all stages, one after the other. An earlier stage
cannot wait for the last one each time, because its own next layers run meanwhile. These modules are small compared with
a stage, so the other stages get copies when the model is loaded. A quantized head and a head of more than `LIMIT` bytes
are not copied.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Self

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.utils import PPMissingLayer

from tracewire_engine.model_layout import find_layers, find_norm

from .plain_messages import gathered

__all__ = ["LIMIT", "replicate"]

logger = logging.getLogger("vllm.tracewire")

#: The largest head, in bytes on one rank, that is copied.
LIMIT = 2 * 1024**3

_HEAD, _PROCESSOR = "lm_head", "logits_processor"


class _Spec:
    """The description of a module that the last stage sends the others, which build it."""

    def __init__(self, path: str, kind: str, attributes: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.path = path
        self.kind = kind
        self.attributes = attributes
        self.tensors = tensors

    @classmethod
    def of(cls, path: str, module: torch.nn.Module) -> Self:
        """Describe the module at `path`."""
        plain = {name: value for name, value in vars(module).items() if type(value) in (int, float, bool, type(None))}
        return cls(path, type(module).__name__, plain, _shapes(module))

    def packed(self) -> list[Any]:
        """The description as plain values."""
        return [self.path, self.kind, self.attributes, self.tensors]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> Self:
        """The description that `packed` made."""
        return cls(*packed)


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _specs(model: torch.nn.Module) -> list[_Spec]:
    """The modules to copy, on the last stage."""
    found = []
    norm = find_norm(model, find_layers(model.named_modules()))
    if norm is not None:
        found.append(_Spec.of(next(path for path, module in model.named_modules() if module is norm), norm))
    head: Any = getattr(model, _HEAD, None)
    processor = getattr(model, _PROCESSOR, None)
    if type(processor) is LogitsProcessor:
        found.append(_Spec.of(_PROCESSOR, processor))
    if (
        type(head) is ParallelLMHead
        and type(head.quant_method) is UnquantizedEmbeddingMethod
        and sum(value.nbytes for _, value in _tensors(head)) <= LIMIT
    ):
        found.append(_Spec.of(_HEAD, head))
    return found


def _built(spec: _Spec, model: torch.nn.Module) -> torch.nn.Module:
    """Build the module that `spec` describes. Its tensors are not filled yet.

    Raises:
        ValueError: this stage cannot build such a module.
    """
    made: torch.nn.Module
    known = spec.attributes
    if spec.path == _PROCESSOR:
        made = LogitsProcessor(known["vocab_size"])
        made.__dict__.update(known)
        return made
    if spec.path == _HEAD:
        shape, dtype = spec.tensors["weight"]
        made = ParallelLMHead(
            known["num_embeddings"],
            shape[1],
            bias="bias" in spec.tensors,
            params_dtype=dtype,
            org_num_embeddings=known["org_vocab_size"],
            padding_size=known["padding_size"],
            prefix=_HEAD,
        )
    else:
        # Copy a norm of the same class and size from one of this stage's layers.
        for module in model.modules():
            if type(module).__name__ == spec.kind and _shapes(module) == spec.tensors:
                made = copy.deepcopy(module)
                break
        else:
            raise ValueError(f"no {spec.kind} of that size on this stage")
        if any(made.__dict__.get(name) != value for name, value in known.items()):
            raise ValueError(f"this stage's {spec.kind} has other settings")
    if _shapes(made) != spec.tensors:
        raise ValueError("its tensors would have other shapes")
    return made


def _shapes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for name, value in _tensors(module)}


def replicate(group: GroupCoordinator, model: torch.nn.Module, config: VllmConfig, device: torch.device) -> None:
    """Give each stage of `group` copies of the final norm and the head. Every stage calls it after loading its part.

    A module that one of the stages cannot build is copied to none.

    Args:
        group: the pipeline group.
        model: this stage's part of the model; the copies are put into it.
        config: vLLM's.
        device: of the copies.
    """
    own = [one.packed() for one in _specs(model)] if group.is_last_rank else None
    specs = [_Spec.unpacked(one) for one in gathered(own, group)[-1]]
    made: list[torch.nn.Module | None] = []
    for spec in specs:
        if group.is_last_rank:
            made.append(model.get_submodule(spec.path))
            continue
        parent, _, name = spec.path.rpartition(".")
        existing = model.get_submodule(parent)._modules.get(name)
        try:
            if existing is not None and not isinstance(existing, PPMissingLayer):
                if spec.tensors:
                    raise ValueError("this stage has a module of its own there")
                made.append(existing)
                continue
            with set_current_vllm_config(config), torch.device(device):
                made.append(_built(spec, model))
        except Exception as exception:  # an unusual model: its blocks do without the copy
            logger.warning("no copy of %s on pipeline stage %d: %s", spec.path, group.rank_in_group, exception)
            made.append(None)
    able = gathered([module is not None for module in made], group)
    for place, (spec, module) in enumerate(zip(specs, made, strict=True)):
        if not all(stage[place] for stage in able):
            continue
        assert module is not None
        for _, tensor in _tensors(module):
            group.broadcast(tensor.data, src=group.world_size - 1)
        if group.is_last_rank:
            continue
        parent, _, name = spec.path.rpartition(".")
        if spec.path == _HEAD:
            module.quant_method.process_weights_after_loading(module)
        model.get_submodule(parent)._modules[name] = module
