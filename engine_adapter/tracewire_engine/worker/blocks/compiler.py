"""Makes an nnsight mediator of a block's source text, in the process that holds the model.

The worker compiles the source once for all requests that send the same text, and unpickles nothing of it. It binds the
values that come with a request (variables, live parameters) for that request alone, so one request's block cannot
change another's.

The block runs as nnsight runs a `with` body: its statements run at the top level of a scope of their own, so that the
names they bind can be saved by name.
"""

from __future__ import annotations

import builtins
import importlib
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from tracewire_bus.wire.codec import digest_bytes
from tracewire_bus.wire.messages import Block
from tracewire_bus.wire.packing import unpack
from tracewire_engine.protocol.input_files import InputFolder
from tracewire_engine.protocol.permits import Permits
from tracewire_engine.worker.tensors import to_tensors

from . import block_names
from . import time_limit as watchdog
from .compiled_source import CompiledSource
from .limited_imports import limited_builtins
from .live_params import LiveRun, LiveValues
from .mediator import BlockMediator, BlockTracer

__all__ = ["BlockCache"]

_blocks = msgspec.msgpack.Decoder(Block)

_encoder = msgspec.msgpack.Encoder()

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class BlockCache:
    """Compiled blocks, by the digest of their text. Beyond `size` of them, the least recently used one is dropped."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        folder: InputFolder = Path(),
        size: int = 256,
        kind: type[BlockMediator] = BlockMediator,
        permits: Permits | None = None,
        imports: Collection[str] = (),
    ) -> None:
        self._model = model
        self._kind = kind
        self.device = device
        self.folder = folder
        self._size = size
        self._permits = Permits(b"") if permits is None else permits
        #: The builtins of blocks whose permit limits their imports.
        self._limited = limited_builtins(imports)
        self._compiled: OrderedDict[bytes, CompiledSource] = OrderedDict()

    def check_permit(self, block: bytes, permit: bytes) -> None:
        """Check the permit of an encoded block.

        Raises:
            NoPermit: the permit is not of this block and this engine's adapter.
        """
        self._permits.check(block, permit)

    def mediator(
        self, block: bytes, live: LiveRun, shared: Mapping[str, Any] = _NOTHING, permit: bytes = b""
    ) -> BlockMediator:
        """Make the mediator of one request's block.

        Args:
            block: a `Block`, encoded with msgpack.
            live: the live parameters of the request's run.
            shared: the values that all blocks of the trace share, by the name of each in the trace.
            permit: the adapter's permit for this block.

        Raises:
            NoPermit: the permit is not of this block and this engine's adapter.
            BaseException: any exception of compiling the source, importing a module, decoding a value or running a
                helper's definition; the caller makes it the request's error.
        """
        limited = self._permits.check(block, permit)
        message = _blocks.decode(block)
        # The key covers the text alone: the values that come with a block are the request's own, and may be large.
        key = digest_bytes(_encoder.encode((message.name, message.source, message.filename, message.first_line)))
        key += digest_bytes(_encoder.encode(message.helpers))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = CompiledSource(message, key.hex()[:12])
            while len(self._compiled) > self._size:
                self._compiled.popitem(last=False)[1].forget()
        else:
            self._compiled.move_to_end(key)

        with watchdog.turn(building=True):
            return self._bind(message, compiled, live, shared, self._limited if limited else builtins.__dict__)

    def _bind(
        self,
        message: Block,
        compiled: CompiledSource,
        live: LiveRun,
        shared: Mapping[str, Any],
        names: dict[str, Any],
    ) -> BlockMediator:
        """A mediator over the compiled code, with this request's own values. `names` are the block's builtins."""
        scope: dict[str, Any] = {"__builtins__": names, "__name__": block_names.__name__}
        load = names["__import__"]
        for name, module in message.modules.items():
            load(module)
            scope[name] = importlib.import_module(module)
        for name, (module, attribute) in message.imports.items():
            load(module)
            scope[name] = _attribute(importlib.import_module(module), attribute)
        for name, path in message.paths.items():
            scope[name] = self._model.get(path) if path else self._model
        model, tracer, live_name = message.parameters
        values = LiveValues(live, self.device)
        scope[model] = self._model
        scope[tracer] = BlockTracer(self._model, values)
        scope[live_name] = values

        variables: dict[str, Any] = to_tensors(unpack(message.variables), self.device, self.folder)
        variables.update({name: shared[own] for name, own in message.shared.items()})
        if compiled.helpers:
            # Helpers have the block's variables as their globals. Defined in one scope, they also see each other.
            shared = {**scope, **variables}
            for code in compiled.helpers:
                exec(code, shared)  # noqa: S102  # nosec B102
            for helper in message.helpers:
                scope[helper.name] = shared[helper.name]
        if names is not builtins.__dict__:
            # nnsight executes the code in these, and Python would put its own builtins there.
            variables["__builtins__"] = names
        mediator = self._kind(compiled.code, scope, variables)
        mediator.compiled, mediator.live = compiled, live
        return mediator


def _attribute(module: types.ModuleType, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
