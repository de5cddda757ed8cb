"""What hosts ask the worker for on behalf of blocks: calls of modules, attributes of modules, large variables.

A host may be in the hands of a hostile block, so that any request may come. A request names a module of the model by
its path, and nothing else can be reached. It reads weights, buffers and plain values of the module, and calls modules
without attention, or has operations inside them served: attention reads and writes the KV cache of all requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nnsight.intervention.source import install_source

from tracewire_engine.link.described_objects import described
from tracewire_engine.link.shared_rows import CopiedRows, RowBytes, SharedValueError, pack_value, unpack_value
from tracewire_engine.protocol.block_host import SOURCE, Answer, Reply, Request, Shape, Shared
from tracewire_engine.protocol.input_files import used_file
from tracewire_engine.worker.parallel.rank_agreement import is_parallel
from tracewire_engine.worker.parallel.topology import OtherStage

from .call_checks import check_inputs, checked_widths
from .pool import HostProcess
from .rank_link import Called, RankLink

if TYPE_CHECKING:
    from tracewire_engine.worker.remote_inputs import RemoteInputs

    from .earlier_stages import EarlierStages

__all__ = ["ModelAnswers"]

#: How many rows all tensors of a call may have together, unless the engine has another limit.
MOST_ROWS = 8192

#: How many operations inside modules a host may wait for and observe.
_OPERATIONS = 1 << 12

#: The names of files of large variables (`input_path`).
_INPUT = re.compile("input-[0-9a-f]{1,128}")


class ModelAnswers:
    """Answers the requests of hosts.

    Args:
        model: nnsight's model, of which blocks may call modules and read attributes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: What a host can name: it may be in a block's hands, and an attribute such as `half` changes the model.
        self._paths = frozenset(path for path, _ in model._module.named_modules(remove_duplicate=False))
        #: How many rows all tensors of a call may have together: the model waits for the call.
        self.most_rows = MOST_ROWS
        #: Whether a module keeps state of all requests, as attention does.
        self.holds_state: Callable[[torch.nn.Module], bool] = lambda module: "kv_cache" in vars(module)
        #: Where the files of large variables lie.
        self.inputs: Path | RemoteInputs = Path()
        #: Under tensor parallelism, on the first rank: the other ranks, which run sharded modules with this one.
        self.others: RankLink | None = None
        #: Under pipeline parallelism, on the last stage: the earlier stages.
        self.earlier: EarlierStages | None = None

    def known(self, reply: Reply) -> Reply:
        """A host's reply, with those locations alone that the model may reach: the others are the block's own.

        Raises:
            SharedValueError: it names more of them than the model has.
        """
        reply.waits = [one for one in reply.waits if self._may_reach(one.location)]
        reply.observed = [one for one in reply.observed if self._may_reach(one)]
        # Each module has few locations, but for operations inside it.
        most = 4 * len(self._paths) + _OPERATIONS
        if len(reply.waits) + len(reply.observed) > most:
            raise SharedValueError(f"it waits for {len(reply.waits)} and observes {len(reply.observed)} locations")
        return reply

    def _may_reach(self, location: str) -> bool:
        module, inside, _ = location.partition(f".{SOURCE}.")
        root, _, path = (module if inside else location.rpartition(".")[0]).partition(".")
        return root == "model" and path in self._paths

    def answer(self, host: HostProcess, request: Request) -> Answer:
        """Do what a block has asked of the model."""
        try:
            if not request.path:
                return Answer(self._given(host, self._input(request.attribute)))
            envoy = self._envoy(request.path)
            if request.attribute == "tokenizer" and envoy is self._model:
                return Answer(self._given(host, self._model.tokenizer))
            if request.attribute == SOURCE:
                return Answer(self._given(host, self._source(envoy)))
            stage = vars(envoy._module).get("tracewire_stage")
            if isinstance(stage, int):
                return Answer(self._given(host, self._called_on(stage, host, request)))
            if request.attribute:
                if request.attribute.startswith("__"):
                    raise AttributeError(request.attribute)
                found = getattr(envoy._module, request.attribute)
                return Answer(self._given(host, found, partial(self._expect_weights, request.attribute)))
            if request.value is None:
                raise ValueError("a call of a module has no arguments")
            return Answer(self._given(host, self._called(host, request.path, request.value)))
        except Exception as error:
            return Answer(error=(type(error).__name__, str(error)[:10_000]))

    def _source(self, envoy: Any) -> tuple[list[str], dict[str, int], str]:
        """Have a module serve the operations of its forward. Returns their names, their lines, and its source."""
        if self.others is not None:
            raise NotImplementedError(
                f"{envoy.path.removeprefix('model.')}.source: under tensor parallelism operations inside a module are "
                "not served to blocks in a process of their own (--blocks host), since each rank has a part of their "
                "values; read and replace the inputs and outputs of modules"
            )
        self._expect_no_cache(envoy, [envoy._module], "operations inside it are not served to")
        compiled = install_source(envoy)
        return list(compiled.names), dict(compiled.lines), compiled.source

    def _expect_no_cache(self, envoy: Any, modules: Iterable[torch.nn.Module], what: str) -> None:
        """Refuse what would read or write the values that all requests have in the KV cache."""
        if any(map(self.holds_state, modules)):
            raise NotImplementedError(
                f"{envoy.path.removeprefix('model.')} has attention, which holds the KV cache of all requests: so "
                f"{what} a block in a process of its own (--blocks host)"
            )

    def _expect_weights(self, name: str, tensor: torch.Tensor) -> None:
        """Refuse a tensor that is no weight of the model, such as a KV cache: it may have values of any request."""
        module = self._model._module
        kept = chain(module.parameters(), module.buffers())
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and all(one.untyped_storage().data_ptr() != address for one in kept):
            raise TypeError(
                f"{name} is neither a parameter nor a buffer of the model, so it cannot be given to a block in a "
                "process of its own (--blocks host)"
            )

    def _called_on(self, stage: int, host: HostProcess, request: Request) -> Any:
        """What a module of another pipeline stage returns to a block, if that stage waits for blocks."""
        if self.earlier is None or self.earlier.waiting != stage or request.attribute or request.value is None:
            raise OtherStage(
                f"{request.path.removeprefix('model.')} is on pipeline stage {stage}: a block in a process of its own "
                "(--blocks host) can call it only before it asks for anything of a later stage, and cannot read its "
                "weights"
            )
        host.returned.check_apart(request.value.tensors)
        copies = CopiedRows()
        shapes = [copies.add(host.returned.read(shape)) for shape in request.value.tensors]
        return self.earlier.call(Called(request.path, Shared(request.value.skeleton, shapes)), copies.bytes())

    def checked_call(self, path: str, value: Shared, rows: RowBytes) -> Any:
        """Call the module at a path for a block of the last stage's hosts, as `call` does.

        Raises:
            Exception: whatever the module raises, and what a block may not call.
        """
        envoy = self._envoy(path)
        self._expect_no_cache(envoy, envoy._module.modules(), "it cannot be called by")
        tensors = [rows.read(shape) for shape in value.tensors]
        check_inputs(envoy._module, tensors, self.most_rows)
        return self._call(envoy, value, tensors)

    def _called(self, host: HostProcess, path: str, value: Shared) -> Any:
        envoy = self._envoy(path)
        self._expect_no_cache(envoy, envoy._module.modules(), "it cannot be called by")
        host.returned.check_apart(value.tensors)
        tensors = [host.returned.read(shape) for shape in value.tensors]
        check_inputs(envoy._module, tensors, self.most_rows)
        if self.others is not None and is_parallel(envoy._module):
            copies = CopiedRows()
            shapes = [copies.add(tensor) for tensor in tensors]
            self.others.tell(Called(path, Shared(value.skeleton, shapes)), copies.bytes())
        return self._call(envoy, value, tensors)

    def call(self, path: str, value: Shared, rows: RowBytes) -> Any:
        """Call the module at a path, as the first rank does.

        Args:
            path: of the module, such as `model.lm_head`.
            value: `(args, kwargs)`.
            rows: among which the tensors of `value` lie.
        """
        return self._call(self._envoy(path), value, [rows.read(shape) for shape in value.tensors])

    def _call(self, envoy: Any, value: Shared, tensors: Sequence[torch.Tensor]) -> Any:
        device = self._model.device
        called = [envoy]

        def module(given: Any) -> Any:
            called.append(self._module(given))
            return called[-1]

        args, kwargs = unpack_value(value, lambda place, _: tensors[place].to(device), module)
        if "hook" in kwargs:
            # The call would be served to the interventions of all requests. An honest host refuses it itself.
            raise TypeError("hook is no argument of a module that a block in a process of its own calls")
        with checked_widths(chain.from_iterable(one._module.modules() for one in called)):
            return envoy(*args, **kwargs)

    def _envoy(self, path: str) -> Any:
        inner = path.removeprefix("model").removeprefix(".")
        if inner not in self._paths:
            raise LookupError(f"the model has no module {inner[:200]!r}")
        return self._model.get(inner) if inner else self._model

    def _input(self, name: str) -> torch.Tensor:
        """The bytes of the file of a large variable."""
        if not _INPUT.fullmatch(name):
            raise ValueError(f"no large variable has the name {name!r}")

        def mapped(path: Path) -> torch.Tensor:
            return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

        return used_file(lambda: self.inputs / name, mapped)

    def _module(self, given: Any) -> Any:
        """A module of the model that a block passes to another one, by its path."""
        if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
            raise ValueError("no module of the model")
        return self._envoy(given[0])

    @staticmethod
    def _given(host: HostProcess, value: Any, check: Callable[[torch.Tensor], None] | None = None) -> Shared:
        memory = host.given

        def write(tensor: torch.Tensor) -> Shape:
            if check is not None:
                check(tensor)
            start = memory.room(tensor.nbytes)
            if start is None:
                raise ValueError(f"it takes more than the {memory.size} bytes of memory that a block shares")
            memory.write(tensor.detach(), start)
            return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)

        return pack_value(value, write, described)
