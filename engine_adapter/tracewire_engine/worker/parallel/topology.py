"""Which pipeline stage holds which module, and stand-ins for the modules that another stage holds.

Under pipeline parallelism vLLM builds on each stage only that stage's modules. A block runs on every stage and names
modules of all of them, so this module completes each stage's tree. In the place of a missing module it puts a stand-in
with the same name, the same children and the same plain attributes. The values of a stand-in come from the stage that
holds the module (`staged_mediator.py`). A stand-in has no tensors and methods: asking for one raises an error that
names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from greenlet import getcurrent
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.envoys import ParallelEnvoy
from vllm.model_executor.models.utils import PPMissingLayer

__all__ = ["OtherStage", "StandIn", "Topology", "described", "packed_tree", "unpacked_tree"]

#: The types of attributes that a stand-in has too.
_PLAIN = (int, float, bool, str, type(None), torch.dtype)

#: Names of modules that run after the last layer, if several stages hold them.
_LATE = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "lm_head", "logits_processor")


class OtherStage(RuntimeError):
    """A block asks for something that its stage cannot give: only another stage has it, or it is over in this step."""


class _Module:
    """The description of a module that stages exchange: its class, plain attributes and other attributes' names."""

    def __init__(self, kind: str, plain: dict[str, Any], names: list[str], first: str) -> None:
        self.kind, self.plain, self.names = kind, plain, names
        #: The first path of this module in the tree. Any other path of it is an alias.
        self.first = first


def described(model: torch.nn.Module) -> dict[str, _Module]:
    """Describe the modules that this stage holds, by path, aliases included."""
    first: dict[int, str] = {}
    found: dict[str, _Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PPMissingLayer):
            continue
        canonical = first.setdefault(id(module), path)
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        plain = {name: value for name, value in own.items() if type(value) in _PLAIN and name != "training"}
        tensors = [*module._parameters, *module._buffers]
        names = sorted({*own, *tensors, *(name for name in vars(type(module)) if not name.startswith("_"))} - {*plain})
        found[path] = _Module(type(module).__name__, plain, names, canonical)
    return found


def packed_tree(tree: Mapping[str, _Module]) -> dict[str, list[Any]]:
    """The descriptions of modules as plain values, for the other stages."""
    return {path: [one.kind, one.plain, one.names, one.first] for path, one in tree.items()}


def unpacked_tree(tree: Mapping[str, Any]) -> dict[str, _Module]:
    """The descriptions of another stage's modules, of what `packed_tree` made."""
    return {path: _Module(*one) for path, one in tree.items()}


class StandIn(PPMissingLayer):
    """Takes the place of a module that another stage holds."""

    def __init__(self, path: str, described: _Module, stage: int) -> None:
        super().__init__()
        self.tracewire_path, self.tracewire_stage, self.tracewire_names = path, stage, frozenset(described.names)
        self.tracewire_kind = described.kind
        self.__dict__.update(described.plain)

    def __getattr__(self, name: str) -> Any:
        # Only a block gets this error. vLLM probes modules for attributes too, and gets the usual AttributeError.
        if name in self.__dict__.get("tracewire_names", ()) and getattr(getcurrent(), "mediator", None) is not None:
            raise OtherStage(
                f"{self.tracewire_path}.{name} is on pipeline stage {self.tracewire_stage} only. A block runs on every "
                "stage. It can read and change the values that pass through another stage's modules, and call these "
                "modules; their weights and methods are out of its reach"
            )
        return super().__getattr__(name)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{self.tracewire_kind}(on pipeline stage {self.tracewire_stage})"


class Topology:
    """Which stage holds which modules. It is the same on every stage, except for `index`, the stage's own number.

    Some modules, such as the whole decoder, have their parts on several stages: the input of such a module is on the
    first of these stages and its output on the last. A module that several stages hold whole runs on one of them.
    """

    def __init__(self, index: int, trees: list[dict[str, _Module]]) -> None:
        self.index = index
        self.count = len(trees)
        self._trees = trees
        #: By a module's path, the stage that has its input and the stage that has its output.
        self.stages: dict[str, tuple[int, int]] = {}
        #: Paths of modules whose parts are on several stages.
        self.split: set[str] = set()
        #: Paths of modules that all stages hold whole, so that each stage can call them by itself.
        self.everywhere: set[str] = set()
        holders: dict[str, list[int]] = {}
        for stage, tree in enumerate(trees):
            for path in tree:
                holders.setdefault(path, []).append(stage)
        for path, held in holders.items():
            inside = f"{path}." if path else ""
            if len(held) > 1 and any(
                holders[other] != held for other in holders if other != path and other.startswith(inside)
            ):
                self.split.add(path)
                self.stages[path] = held[0], held[-1]
                continue
            module = trees[held[0]][path]
            owner = held[-1] if path.rpartition(".")[2] in _LATE or module.kind == "LogitsProcessor" else held[0]
            self.stages[path] = owner, owner
            if len(held) == self.count:
                self.everywhere.add(path)
        #: Whether this stage is taking the logs of later stages, of a step that it has finished itself.
        self.catching_up = False
        #: How many messages this stage has sent to other stages, and how many values it has served to blocks.
        self.messages = 0
        self.served = 0
        self._owners: dict[str, int | None] = {}
        #: Locations that the model passes on this stage although another stage serves them.
        self.elsewhere = frozenset(
            f"{_envoy_path(path)}.{side}"
            for path, (entered, left) in self.stages.items()
            if path in trees[index]
            for side, stage in (("input", entered), ("output", left), ("skip", left))
            if stage != index
        )

    @property
    def last(self) -> int:
        """The index of the last stage, which samples and reports."""
        return self.count - 1

    def owner(self, location: str) -> int | None:
        """The stage that serves a location; `None` if every stage does."""
        try:
            return self._owners[location]
        except KeyError:
            found = self._owners[location] = self._owner(location)
            return found

    def _owner(self, location: str) -> int | None:
        if location != "model" and not location.startswith("model."):
            return None
        path, _, side = location.removeprefix("model").removeprefix(".").removesuffix("()").rpartition(".")
        if location.endswith("()"):
            path = f"{path}.{side}".removeprefix(".")
        elif not path and side not in ("input", "skip"):
            # The root module's output, the logits and the samples.
            return self.last
        while path not in self.stages:
            path = path.rpartition(".")[0]
        return self.stages[path][0 if side == "input" else 1]

    def complete(self, model: torch.nn.Module) -> None:
        """Put stand-ins into this stage's tree for all modules that it lacks."""
        own: dict[str, torch.nn.Module] = dict(model.named_modules(remove_duplicate=False))
        own = {path: module for path, module in own.items() if not isinstance(module, PPMissingLayer)}
        for stage, tree in enumerate(self._trees):
            if stage == self.index:
                continue
            for path, module in tree.items():
                if path in own:
                    continue
                made = own.get(module.first)
                if made is None:
                    made = StandIn(module.first, module, self.stages[path][1])
                parent, _, name = path.rpartition(".")
                own[parent]._modules[name] = own[path] = made

    def adopt(self, root: Envoy) -> None:
        """Make blocks' calls of modules run on the stage that holds the module, unless all stages hold it."""
        for path in self.stages:
            if not path or path in self.everywhere:
                continue
            envoy: Any = root
            for name in path.split("."):
                envoy = envoy._child_map[name]
            if envoy.path != _envoy_path(path):
                continue
            if path in self.split:
                envoy.__class__ = _SplitEnvoy
            elif self.stages[path][1] != self.index:
                envoy.__class__ = _ElsewhereEnvoy
            elif type(envoy) is ParallelEnvoy:
                envoy.__class__ = _ParallelHereEnvoy
            elif type(envoy) is Envoy:
                envoy.__class__ = _HereEnvoy


def _envoy_path(path: str) -> str:
    return f"model.{path}" if path else "model"


def _refuse_source(envoy: Envoy) -> Any:
    raise OtherStage(
        f"{envoy.path.removeprefix('model.')}.source: operations inside a module are not served under pipeline "
        "parallelism, where only one stage has the module's code"
    )


class _HereEnvoy(Envoy):
    """A module that this stage holds and another does not. The stage sends the results of its calls to the others."""

    source = property(_refuse_source)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        result = super().__call__(*args, hook=hook, **kwargs)
        mediator: Any = Mediator.current(self.path) if hasattr(getcurrent(), "mediator") else None
        if mediator is not None:
            mediator.called(self.path, result)
        return result


class _ParallelHereEnvoy(_HereEnvoy, ParallelEnvoy):
    """A `_HereEnvoy` of a module that is sharded by tensor parallelism."""


class _ElsewhereEnvoy(Envoy):
    """A module that another stage holds. A call waits for the result of the call on that stage."""

    source = property(_refuse_source)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        mediator: Any = Mediator.current(self.path)
        mediator.calls_elsewhere(self.path)
        return Mediator.value(f"{self.path}()")


class _SplitEnvoy(Envoy):
    """A module whose parts are on several stages. Its values are served; it cannot be called or skipped."""

    source = property(_refuse_source)

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        raise OtherStage(f"{self.path.removeprefix('model.')}() cannot be called: its parts are on several stages")

    def skip(self, replacement: Any) -> None:
        raise OtherStage(f"{self.path.removeprefix('model.')} cannot be skipped: its parts are on several stages")
