"""Compiles the activations and the rotary embeddings of a model with taps, as plain vLLM compiles the whole model.

vLLM does not compile a model with taps, since nnsight's hooks run between its modules. Such a model calls vLLM's own
kernels, which take up to twice as long as compiled ones (docs/performance.md). So the worker compiles them from vLLM's
definitions in PyTorch, and records the compiled kernels in CUDA graphs of the sizes for which they are faster. Both
come to the same values, bit for bit. Outside of graphs the model keeps to vLLM's kernels: Python launches them in a
tenth of the time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

__all__ = ["compile_kernels"]

logger = logging.getLogger("vllm.tracewire")

#: For fewer tokens than these, nothing is compiled yet: the compiler lays its kernel out for about as many as it is
#: first given. vLLM first gives it a whole step.
_FEWEST = 16
#: How many rows are compared with those of vLLM's kernel when one is compiled.
_COMPARED = 64
#: The positions of these rows are below this.
_POSITIONS = 256
#: For so many tokens each, and for one, both kernels are timed.
_TIMED = (16, 32, 64, 128, 256, 512)


def _compiled(function: Any, rounds: bool) -> Any:
    """As vLLM compiles: what is computed of several tensors at once becomes one kernel.

    Args:
        function: what is compiled.
        rounds: whether the kernel rounds each value in between to the tensors' type, as PyTorch's operations do.
    """
    options = {"combo_kernels": True, "benchmark_combo_kernel": True, "emulate_precision_casts": rounds}
    return torch.compile(function, options=options)


#: How many calls a graph has that times a kernel, and how often it runs. A run takes less than a millisecond: where
#: processes take turns on a GPU, most runs are within a turn.
_CALLS, _RUNS = 100, 24


def _timed(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """How many milliseconds the kernels of each call take within a CUDA graph.

    All graphs have as many calls, however long Python takes to launch each of them. They run in turns, and the fastest
    run of each counts, since other processes may use the GPU meanwhile.
    """
    # The graphs are captured on a stream of their own, where the tensors must be whole.
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graphs = [_captured(call) for call in calls]
        runs = [[_milliseconds(graph.replay) for graph in graphs] for _ in range(_RUNS)]
    return [min(times) / _CALLS for times in zip(*runs, strict=True)]


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    # The capture leaves out the work of other threads on the device.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(_CALLS):
            call()
    finally:
        graph.capture_end()
    return graph


def _milliseconds(launch: Callable[[], Any]) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    launch()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def compile_kernels(
    model: torch.nn.Module,
    compiled: Callable[[Any, bool], Any] = _compiled,
    timed: Callable[[Sequence[Callable[[], Any]]], list[float]] = _timed,
    *,
    serving: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Have modules of vLLM's model compiled when the model first calls them: activations and rotary embeddings.

    A module that cannot be compiled stays as it was.

    Args:
        model: vLLM's.
        compiled: compiles a function, to a kernel that rounds in between or does not.
        timed: how long each of several calls takes.
        serving: whether the engine serves requests. A module that is first called then stays as it was.

    Returns:
        The paths of the modules that are compiled.
    """
    # vLLM's kernel of this activation rounds in between, and the one of rotary embeddings does not.
    silu = SiluAndMul.forward_native
    activations = _Function("activations", [compiled(silu, rounds) for rounds in (True, False)], timed)
    found = []
    for path, module in model.named_modules():
        if type(module) is SiluAndMul:
            function = activations
        elif _is_common_rotation(module):
            rotation = _rotation(module)
            function = _Function("rotary embeddings", [compiled(rotation, rounds) for rounds in (False, True)], timed)
        else:
            continue
        module.__dict__["_forward_method"] = _Compiled(module, function, serving)
        found.append(path)
    return found


def _is_common_rotation(module: Any) -> bool:
    """Whether a module is a rotary embedding that vLLM's common kernel computes."""
    if not isinstance(module, RotaryEmbedding) or module.use_flashinfer:
        return False
    kind = type(module)
    return all(
        getattr(kind, name) is getattr(RotaryEmbedding, name)
        for name in ("forward_static", "forward_native", "forward_cuda", "_match_cos_sin_cache_dtype")
    )


def _rotation(module: RotaryEmbedding) -> Callable[..., Any]:
    """The definition of a rotary embedding, as a function of tensors alone."""
    size, dims, neox = module.head_size, module.rotary_dim, module.is_neox_style

    def rotated(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cache: torch.Tensor) -> Any:
        return RotaryEmbedding.forward_static(positions, query, key, size, dims, cache, neox)

    return rotated


class _Faster(NamedTuple):
    """Where a compiled kernel is at least as fast as vLLM's: for one token, and for 2 to `most` of them."""

    call: Callable[..., Any] | None = None
    single: bool = False
    most: float = 0

    def holds(self, tokens: int) -> bool:
        """Whether it is so for this many tokens."""
        return self.single if tokens == 1 else tokens <= self.most

    def __str__(self) -> str:
        if self.call is None:
            return "vLLM's kernels, since compiled ones come to other values"
        sizes = ["1"] if self.single else []
        if self.most > 1:
            sizes.append("2 and more" if self.most == math.inf else f"2 to {self.most}")
        if not sizes:
            return "vLLM's kernels, which are faster here"
        return f"compiled kernels in steps with so many tokens: {', '.join(sizes)}"


class _Function:
    """What modules of one kind share: the function that is compiled, and whether that has failed.

    Args:
        kind: of the modules, for a warning.
        calls: the function, compiled in several ways; the first way counts that comes to the values of vLLM's kernel.
            The first dimension of its tensors is the token.
        timed: how long each of several calls takes.
    """

    def __init__(
        self,
        kind: str,
        calls: Sequence[Callable[..., Any]],
        timed: Callable[[Sequence[Callable[[], Any]]], list[float]],
    ) -> None:
        self._kind, self._calls, self._timed, self.failed = kind, calls, timed, False
        #: By the form of its tensors.
        self.faster: dict[Any, _Faster] = {}

    def compile(
        self, form: Any, given: tuple[torch.Tensor, ...], more: tuple[Any, ...], own: Callable[..., Any]
    ) -> None:
        """Compile it for tensors like `given`, of this form, unless it comes to other values than `own` does."""
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)
        # Whatever goes wrong, this form is not tried again.
        self.faster[form] = _Faster()
        try:
            same = next((call for call in self._calls if self._is_same(call, given, more, own)), None)
            why = "they come to other values than vLLM's" if same is None else ""
            if same is not None:
                self.faster[form] = self._compare(same, given, more, own)
        except Exception as error:  # of any part of the compiler
            why, self.failed = repr(error), True
        if why:
            logger.warning("the model's %s are not compiled, which costs some speed: %s", self._kind, why)

    def _compare(
        self, call: Callable[..., Any], given: tuple[torch.Tensor, ...], more: tuple[Any, ...], own: Callable[..., Any]
    ) -> _Faster:
        """Time both kernels."""

        def is_faster(rows: int) -> bool:
            drawn = _drawn(given, rows, more)
            compiled, vllms = self._timed([partial(call, *drawn, *more), partial(own, *drawn)])
            return compiled <= vllms

        most: float = 1
        for rows in _TIMED:
            if not is_faster(rows):
                break
            most = rows
        else:
            most = math.inf
        found = _Faster(call, is_faster(1), most)
        logger.info("in CUDA graphs, the worker computes the model's %s by %s", self._kind, found)
        return found

    def _is_same(
        self, call: Callable[..., Any], given: tuple[torch.Tensor, ...], more: tuple[Any, ...], own: Callable[..., Any]
    ) -> bool:
        """Compile for these tensors, and compare with the values of vLLM's kernel."""
        call(*given, *more)
        return all(_is_alike(call, _drawn(given, rows, more), more, own) for rows in (_COMPARED, 1))


def _is_alike(
    call: Callable[..., Any], given: list[torch.Tensor], more: tuple[Any, ...], own: Callable[..., Any]
) -> bool:
    """Whether two kernels come to the same values."""
    values = call(*given, *more)
    # vLLM's kernel may write to what it is given.
    theirs = own(*(tensor.clone() for tensor in given))
    return all(
        value.dtype == other.dtype and bool(((value == other) | (value.isnan() & other.isnan())).all())
        for value, other in zip(_listed(values), _listed(theirs), strict=True)
    )


class _Compiled:
    """A module, compiled by its first call, for one token and for any other number of them.

    A block may call the module with another kind of tensor. Then vLLM's own kernel computes it: compiling for that one,
    too, would take seconds.
    """

    def __init__(self, module: Any, function: _Function, serving: Callable[[], bool]) -> None:
        self._function, self._own, self._serving = function, module._forward_method, serving
        self._rotation = module if isinstance(module, RotaryEmbedding) else None
        #: Of the tensors for which it is compiled.
        self._form: Any = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        tensors = 1 if self._rotation is None else 3
        if named or len(given) != tensors or not all(isinstance(one, torch.Tensor) and one.ndim for one in given):
            return self._own(*given, **named)
        function = self._function
        if not _is_recorded(given[0]):
            if self._form is None and not function.failed and len(given[0]) >= _FEWEST and not self._serving():
                self._form = self._form_of(given)
                if self._form not in function.faster:
                    function.compile(self._form, given, self._more(given), self._own)
            return self._own(*given)
        found = function.faster.get(self._form, _Faster())
        if found.call is not None and found.holds(len(given[0])) and self._form == self._form_of(given):
            return found.call(*given, *self._more(given))
        return self._own(*given)

    def _more(self, given: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """What its function takes besides what the model gives the module."""
        return () if self._rotation is None else (self._rotation._match_cos_sin_cache_dtype(given[1]),)

    def _form_of(self, given: tuple[torch.Tensor, ...]) -> Any:
        """All for which PyTorch would compile anew, but the number of tokens; `None` if there are none."""
        if not len(given[0]):
            return None
        tensors = tuple(
            (type(x), x.dtype, x.shape[1:], x.stride(), x.storage_offset(), x.device, x.requires_grad, x.is_inference())
            for x in (*given, *self._more(given))
        )
        device = given[0].device.type
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled(device)
        # A block may have changed these, or entered a `with torch.device(...)`.
        rest = torch.get_default_dtype(), torch.get_num_threads(), torch._C._len_torch_function_stack()
        return tensors, modes, rest


def _drawn(given: tuple[torch.Tensor, ...], rows: int, more: tuple[Any, ...]) -> list[torch.Tensor]:
    """Random tensors, laid out as the first rows of these: vLLM's first steps may have the same token in each row.

    Positions are among those that the tables in `more` have.
    """
    positions = min([_POSITIONS, *map(len, more)])
    drawn = []
    for tensor in given:
        first = tensor[:rows]
        offset = first.storage_offset()
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(first.shape, first.stride(), strict=True))
        storage = torch.empty(extent, dtype=first.dtype, device=first.device)
        new = storage.as_strided(first.shape, first.stride(), offset)
        generator = torch.Generator(first.device).manual_seed(rows)
        drawn.append(
            new.normal_(generator=generator)
            if first.is_floating_point()
            else new.random_(0, positions, generator=generator)
        )
    return drawn


def _listed(values: Any) -> Any:
    return values if isinstance(values, tuple) else (values,)


def _is_recorded(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being recorded."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())
