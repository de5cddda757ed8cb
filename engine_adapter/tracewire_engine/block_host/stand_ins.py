"""What a host has in place of vLLM and of the model.

A host runs no model, and importing vLLM takes long and much memory. A few modules of nnsight and of this package
name some of vLLM's classes; a host gives them empty ones. The outputs that `tracer.result` shows are real
classes, with vLLM's attributes.

The model is a tree of modules without weights. Calls of modules and reads of their attributes go to the worker.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tracewire_engine.protocol.block_host import ModuleOutline

__all__ = ["StandInModule", "install_vllm", "is_stand_in", "tree_of"]


class _VllmFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes any module of vLLM an empty one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("vllm", "triton"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _VllmModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(_REAL.get(module.__name__, {}))


class _VllmModule(types.ModuleType):
    """A module each of whose names is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


@dataclass
class Logprob:
    """vLLM's `Logprob`."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """vLLM's `CompletionOutput`."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: Any = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """vLLM's `RequestOutput`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Any
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: Any = None
    lora_request: Any = None


class BreakableCUDAGraphCapture:
    """vLLM's capture of CUDA graphs. A host captures none."""

    @classmethod
    def current(cls) -> None:
        """There is no capture under way."""


_REAL: dict[str, dict[str, Any]] = {
    "vllm.compilation.breakable_cudagraph": {"BreakableCUDAGraphCapture": BreakableCUDAGraphCapture},
    "vllm.logprobs": {"Logprob": Logprob},
    "vllm.outputs": {"CompletionOutput": CompletionOutput, "RequestOutput": RequestOutput},
}


def install_vllm() -> None:
    """Give this process empty modules in place of vLLM's. Called before anything imports vLLM."""
    if not any(isinstance(finder, _VllmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _VllmFinder())


#: Reads an attribute of the model's module at a path.
Fetch = Callable[[str, str], Any]


class StandInModule(torch.nn.Module):
    """A module of the model without its weights. Its unknown attributes are read from the model."""

    fetch: Fetch
    outline: ModuleOutline

    def extra_repr(self) -> str:
        return self.outline.extra

    def _get_name(self) -> str:
        return self.outline.name

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules") or {}
        if name in modules:
            return modules[name]
        outline = self.__dict__.get("outline")
        if outline is None or name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["fetch"](outline.path, name)
        except AttributeError as error:
            raise AttributeError(f"{outline.name!r} object has no attribute {name!r}", name=name, obj=self) from error


class _StandInList(torch.nn.ModuleList):
    def _get_name(self) -> str:
        name: str = self.__dict__["outline"].name
        return name


def is_stand_in(module: torch.nn.Module) -> bool:
    """Whether a module stands for one of the model. A block may have attached others."""
    return isinstance(vars(module).get("outline"), ModuleOutline)


_KINDS: dict[str, type[torch.nn.Module]] = {"list": _StandInList}


def tree_of(modules: Sequence[ModuleOutline], fetch: Fetch) -> torch.nn.Module:
    """The model as a tree of stand-ins.

    Args:
        modules: in an order in which each comes behind the module that holds it; the root first.
        fetch: reads an attribute of a module of the model.
    """
    made: dict[str, torch.nn.Module] = {}
    for outline in modules:
        module = _KINDS.get(outline.kind, StandInModule)() if outline.same is None else made[outline.same]
        made[outline.path] = module
        if outline.path:
            above, _, name = outline.path.rpartition(".")
            made[above].add_module(name, module)
    for outline in modules:
        if outline.same is None:
            made[outline.path].__dict__.update(outline=outline, fetch=fetch)
    return made[""]
