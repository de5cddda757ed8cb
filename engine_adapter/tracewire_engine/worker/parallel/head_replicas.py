"""The final norm and the head on every pipeline stage, so that a block can look through them at any layer.

A logit lens calls modules that only the last stage has, on values of all stages, one after the other. Waiting for the
last stage each time would be too late for the next layer of an earlier one. These modules are small beside a stage, so
the others get copies of them when the model is loaded. What cannot be copied (a quantized head, one of more than
`LIMIT` bytes) stays where it is.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.utils import PPMissingLayer

from tracewire_engine.model_layout import find_layers, find_norm

__all__ = ["LIMIT", "replicate"]

logger = logging.getLogger("vllm.tracewire")

#: Bytes of a head, on one rank, up to which it is copied.
LIMIT = 2 * 1024**3

_HEAD, _PROCESSOR = "lm_head", "logits_processor"


class _Spec:
    """The description of a module that the last stage sends the others, which build it."""

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self.path = path
        self.kind = type(module).__name__
        self.attributes = {
            name: value for name, value in vars(module).items() if type(value) in (int, float, bool, type(None))
        }
        self.tensors = {name: (tuple(value.shape), value.dtype) for name, value in _tensors(module)}


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _specs(model: torch.nn.Module) -> list[_Spec]:
    """The modules to copy, on the last stage."""
    found = []
    norm = find_norm(model, find_layers(model.named_modules()))
    if norm is not None:
        found.append(_Spec(next(path for path, module in model.named_modules() if module is norm), norm))
    head: Any = getattr(model, _HEAD, None)
    processor = getattr(model, _PROCESSOR, None)
    if type(processor) is LogitsProcessor:
        found.append(_Spec(_PROCESSOR, processor))
    if (
        type(head) is ParallelLMHead
        and type(head.quant_method) is UnquantizedEmbeddingMethod
        and sum(value.nbytes for _, value in _tensors(head)) <= LIMIT
    ):
        found.append(_Spec(_HEAD, head))
    return found


def _built(spec: _Spec, model: torch.nn.Module) -> torch.nn.Module:
    """A module as `spec` says, its tensors not yet filled.

    Raises:
        ValueError: this stage has nothing to make it of.
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
        # A norm of the same class and size, which each layer has.
        for module in model.modules():
            if type(module).__name__ == spec.kind and _shapes(module) == spec.tensors:
                made = copy.deepcopy(module)
                break
        else:
            raise ValueError(f"no {spec.kind} of that size on this stage")
        if any(made.__dict__.get(name) != value for name, value in known.items()):
            raise ValueError(f"this stage's {spec.kind} is set otherwise")
    if _shapes(made) != spec.tensors:
        raise ValueError("it would be of another shape")
    return made


def _shapes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(value.shape), value.dtype) for name, value in _tensors(module)}


def replicate(group: GroupCoordinator, model: torch.nn.Module, config: VllmConfig, device: torch.device) -> None:
    """Give each stage of `group` the modules at the end of the model. Called on all of them, once it is loaded."""
    told: list[Any] = [_specs(model) if group.is_last_rank else None]
    torch.distributed.broadcast_object_list(told, src=group.ranks[-1], group=group.cpu_group)
    specs: list[_Spec] = told[0]
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
                    raise ValueError("this stage has one of its own")
                made.append(existing)
                continue
            with set_current_vllm_config(config), torch.device(device):
                made.append(_built(spec, model))
        except Exception as exception:  # of models unlike the usual
            logger.warning("no copy of %s on pipeline stage %d: %s", spec.path, group.rank_in_group, exception)
            made.append(None)
    able: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(able, [module is not None for module in made], group=group.cpu_group)
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
