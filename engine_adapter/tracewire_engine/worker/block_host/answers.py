"""What hosts ask the worker for on behalf of blocks: calls of modules, attributes of modules, large variables.

A host may be in the hands of a hostile block, so that any request may come. A request names a module of the model by
its path, and nothing else can be reached. It reads weights, buffers and plain values of the module, and calls modules
without attention: attention reads and writes the KV cache of all requests.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracewire_engine.link.described_objects import described
from tracewire_engine.link.shared_rows import pack_value, unpack_value
from tracewire_engine.protocol.block_host import Answer, Request, Shape, Shared

from .pool import HostProcess

if TYPE_CHECKING:
    from tracewire_engine.worker.remote_inputs import RemoteInputs

__all__ = ["ModelAnswers", "check_inputs"]

#: How many rows all tensors of a call may have together, unless the engine has another limit.
MOST_ROWS = 8192

#: The names of files of large variables (`input_path`).
_INPUT = re.compile("input-[0-9a-f]{1,128}")


class ModelAnswers:
    """Answers the requests of hosts.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
        most_rows: how many rows all tensors of a call may have together. The model waits for the call.
        holds_state: whether a module keeps state of all requests, as attention does.
    """

    def __init__(
        self,
        model: Any,
        most_rows: int = MOST_ROWS,
        holds_state: Callable[[torch.nn.Module], bool] = lambda module: False,
    ) -> None:
        self._model, self._most_rows, self._holds_state = model, most_rows, holds_state
        self._paths = {path for path, _ in model._module.named_modules(remove_duplicate=False)}
        #: Where the files of large variables lie.
        self.inputs: Path | RemoteInputs = Path()

    def answer(self, host: HostProcess, request: Request) -> Answer:
        """Do what a block has asked of the model."""
        try:
            if not request.path:
                return Answer(self._given(host, self._input(request.attribute)))
            if request.attribute:
                return Answer(self._given(host, self._attribute(request.path, request.attribute)))
            return Answer(self._given(host, self._called(host, request)))
        except Exception as error:
            return Answer(error=(type(error).__name__, str(error)[:10_000]))

    def _envoy(self, path: str) -> Any:
        """The envoy of a module by its path, which begins with `model`."""
        root, _, below = path.partition(".")
        if root != "model" or below not in self._paths:
            raise ValueError(f"the model has no module {path[:200]!r}")
        return self._model.get(below) if below else self._model

    def _attribute(self, path: str, name: str) -> Any:
        envoy = self._envoy(path)
        if envoy is self._model and name == "tokenizer":
            return self._model.tokenizer
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(envoy._module, name)
        self._check_own(envoy._module, name, value)
        return value

    def _check_own(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Check that tensors of a value are weights or buffers: others may belong to requests, such as a KV cache."""
        own: set[int] | None = None
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, torch.Tensor):
                own = _memory_of(module) if own is None else own
                if one.numel() and one.untyped_storage().data_ptr() not in own:
                    raise TypeError(f"{type(module).__name__}.{name} has tensors that are no weights and no buffers")
            elif isinstance(one, dict):
                waiting += one.values()
            elif isinstance(one, list | tuple):
                waiting += one

    def _called(self, host: HostProcess, request: Request) -> Any:
        given = request.value
        if given is None:
            raise ValueError("a call of a module has no arguments")
        envoy = self._envoy(request.path)
        if any(map(self._holds_state, envoy._module.modules())):
            raise NotImplementedError(
                f"{request.path.removeprefix('model.')} has attention, which reads and writes the KV cache of all "
                "requests: a block in a process of its own cannot call it (--blocks host)"
            )
        host.returned.check_apart(given.tensors)
        tensors: list[torch.Tensor] = []

        def taken(_: int, shape: Shape) -> torch.Tensor:
            tensors.append(host.returned.read(shape))
            return tensors[-1].to(self._model.device)

        args, kwargs = unpack_value(given, taken, self._module)
        check_inputs(envoy._module, tensors, self._most_rows)
        return envoy(*args, **kwargs)

    def _input(self, name: str) -> torch.Tensor:
        """The bytes of the file of a large variable."""
        if not _INPUT.fullmatch(name):
            raise ValueError(f"no large variable has the name {name!r}")
        path = str(self.inputs / name)
        return torch.from_file(path, shared=False, size=os.stat(path).st_size, dtype=torch.uint8)

    def _module(self, given: Any) -> Any:
        """A module of the model that a block passes to another one, by its path."""
        if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
            raise ValueError("no module of the model")
        return self._envoy(given[0])

    def _given(self, host: HostProcess, value: Any) -> Shared:
        memory = host.given

        def write(tensor: torch.Tensor) -> Shape:
            start = memory.room(tensor.nbytes)
            if start is None:
                raise ValueError(f"it takes more than the {memory.size} bytes of memory that a block shares")
            memory.write(tensor.detach(), start)
            return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

        return pack_value(value, write, described)


def _memory_of(module: torch.nn.Module) -> set[int]:
    """Where the memory of a module's weights and buffers, and of those of the modules below it, begins."""
    return {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}


def check_inputs(module: torch.nn.Module, tensors: Sequence[torch.Tensor], most_rows: int) -> None:
    """Check the tensors with which a block calls a module: kernels of the engine read what lies behind short ones.

    A row is a vector along the last axis, and an index of a tensor of integers.

    Raises:
        ValueError: they have too many rows, different numbers of rows, indices of no row of the module's weights and
            buffers, or a norm's have another width or kind of number than its weight.
    """
    rows = [one.numel() if _counts(one) else math.prod(one.shape[:-1]) for one in tensors]
    if sum(rows) > most_rows:
        raise ValueError(
            f"a call of a module takes tensors of {most_rows} rows together, and these have {sum(rows)}: every request "
            "waits for it; call it for fewer rows at once"
        )
    if len(set(rows)) > 1:
        raise ValueError(f"the tensors of a call have {' and '.join(map(str, rows))} rows; give them as many each")
    weights = list(module.parameters())
    tables = [one.shape[0] for one in (*weights, *module.buffers()) if one.ndim]
    most = min(tables, default=0)
    widths = {(one.shape[-1], one.dtype) for one in weights if one.ndim == 1}
    for tensor in tensors:
        if _counts(tensor):
            if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < most:
                raise ValueError(f"indices from {int(tensor.min())} to {int(tensor.max())} of a table of {most} rows")
        elif weights and len(widths) == 1 and all(one.ndim == 1 for one in weights):
            ((width, dtype),) = widths
            if (tuple(tensor.shape[-1:]), tensor.dtype) != ((width,), dtype):
                raise ValueError(
                    f"{type(module).__name__} takes rows of {width} numbers of {dtype}, and these are of "
                    f"{tuple(tensor.shape[-1:])} of {tensor.dtype}"
                )


def _counts(tensor: torch.Tensor) -> bool:
    """Whether a tensor has integers, which a module takes as indices."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
