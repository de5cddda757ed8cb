"""What hosts ask the worker for on behalf of blocks: calls of modules, attributes of modules, large variables."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tracewire_engine.link.described_objects import described
from tracewire_engine.link.shared_rows import pack_value, unpack_value
from tracewire_engine.protocol.block_host import Answer, Request, Shape, Shared

from .pool import HostProcess

if TYPE_CHECKING:
    from tracewire_engine.worker.remote_inputs import RemoteInputs

__all__ = ["ModelAnswers"]

#: The names of files of large variables (`input_path`).
_INPUT = re.compile("input-[0-9a-f]{1,128}")


class ModelAnswers:
    """Answers the requests of hosts.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: Where the files of large variables lie.
        self.inputs: Path | RemoteInputs = Path()

    def answer(self, host: HostProcess, request: Request) -> Answer:
        """Do what a block has asked of the model."""
        try:
            if not request.path:
                return Answer(self._given(host, self._input(request.attribute)))
            path = request.path.removeprefix("model").removeprefix(".")
            envoy = self._model.get(path) if path else self._model
            if request.attribute == "tokenizer" and not path:
                return Answer(self._given(host, self._model.tokenizer))
            if request.attribute:
                return Answer(self._given(host, getattr(envoy._module, request.attribute)))
            assert request.value is not None
            taken = unpack_value(request.value, lambda _, shape: self._taken(host, shape), self._module)
            args, kwargs = taken
            return Answer(self._given(host, envoy(*args, **kwargs)))
        except Exception as error:
            return Answer(error=(type(error).__name__, str(error)[:10_000]))

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
        return self._model.get(given[0].removeprefix("model."))

    def _taken(self, host: HostProcess, shape: Shape) -> torch.Tensor:
        device = self._model.device
        return host.returned.read(shape).to(device)

    def _given(self, host: HostProcess, value: Any) -> Shared:
        memory = host.given

        def write(tensor: torch.Tensor) -> Shape:
            start = memory.room(tensor.nbytes)
            if start is None:
                raise ValueError(f"it takes more than the {memory.size} bytes of memory that a block shares")
            memory.write(tensor.detach(), start)
            return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

        return pack_value(value, write, described)
