"""Puts the taps into the CUDA graphs of vLLM's second model runner.

The second runner has a manager that captures graphs and replays them. The manager captures PIECEWISE graphs by a
breakable wrapper, in which nnsight serves the taps. FULL graphs compute the requests that generate. The manager
captures them by PyTorch's own capture, and such a graph has no place for a tap. `tap_graphs` makes the manager capture
several FULL graphs of each batch size, as `cuda_graphs.py` does for the first runner: a bare one, one that breaks at
the taps, and a whole one, whose taps kernels serve.

All of them copy the model's output to a buffer of the manager as their last operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.model_executor.offloader.base import get_offloader
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

from .cuda_graphs import TapServing, has_tap, without_taps
from .graph_proof import BothGraphs, inputs_in

__all__ = ["tap_graphs", "untapped"]


class TappedGraphs(CudaGraphManager):
    """vLLM's manager, whose `graphs` break at the taps; and beside them those that do not, by batch."""

    tracewire_serving: TapServing
    tracewire_bare: dict[Any, Any]
    #: The whole graphs, and what the model was given when they were captured.
    tracewire_whole: dict[Any, Any]
    tracewire_inputs: dict[Any, list[torch.Tensor]]
    tracewire_model: torch.nn.Module

    @torch.inference_mode()
    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        serving = self.tracewire_serving

        def create(desc: Any, warmup: bool) -> Any:
            made = create_forward_fn(desc, warmup=warmup)
            if warmup or desc.cg_mode != CUDAGraphMode.FULL:
                return made
            forward, *more = made if isinstance(made, tuple) else (made,)

            def bare(mode: Any) -> None:
                with serving.capturing("bare"):
                    forward(mode)

            return (bare, *more) if more else bare

        states = super().capture(create, *args, **kwargs)
        self.tracewire_bare = dict(self.graphs)
        with graph_capture(device=self.device):
            for desc in self.tracewire_bare:
                if serving.has_kernels:
                    self.tracewire_whole[desc] = self._whole(_forward(create_forward_fn, desc), desc)
                self.graphs[desc] = self._broken(_forward(create_forward_fn, desc))
        return states

    def _whole(self, forward: Callable[..., Any], desc: Any) -> Any:
        """Capture a graph whose taps kernels serve. vLLM has run the model for this batch size before."""
        captured = torch.cuda.CUDAGraph()
        get_offloader().sync_prev_onload()
        kind, noted = self.tracewire_serving.capturing("whole"), _noted_inputs(self.tracewire_model)
        # A pool's memory is used again on the same stream only.
        capture = torch.cuda.graph(captured, self.pool, stream=torch.cuda.current_stream())
        with kind, noted as self.tracewire_inputs[desc], capture:
            forward(CUDAGraphMode.NONE)
            get_offloader().join_after_forward()
        return captured

    def _broken(self, forward: Callable[..., Any]) -> Any:
        """Capture a graph that breaks at the taps."""
        get_offloader().sync_prev_onload()
        with BreakableCUDAGraphCapture(pool=self.pool) as captured:
            # In this mode attention stays within the graph.
            forward(CUDAGraphMode.FULL)
            get_offloader().join_after_forward()
        return captured

    def run_fullgraph(self, desc: Any) -> Any:
        serving = self.tracewire_serving
        graphs = serving.graphs_for(desc.num_tokens)
        if graphs == "bare":
            self._run(self.tracewire_bare[desc])
        elif graphs == "whole":
            self._run(self.tracewire_whole[desc])
        elif graphs == "both":
            inputs = partial(self.tracewire_inputs.__getitem__, desc)
            serving.run_both(BothGraphs(partial(self._run_whole, desc), partial(self._run_broken, desc), inputs))
        else:
            super().run_fullgraph(desc)

    @staticmethod
    def _run(graph: Any) -> None:
        get_offloader().sync_prev_onload()
        graph.replay()

    def _run_whole(self, desc: Any) -> Any:
        self._run(self.tracewire_whole[desc])
        return self._output(desc)

    def _run_broken(self, desc: Any) -> Any:
        CudaGraphManager.run_fullgraph(self, desc)
        return self._output(desc)

    def _output(self, desc: Any) -> Any:
        """The rows of the manager's buffers that a graph writes: hidden states, or a stage's tensors."""
        manager: Any = self
        found = manager.hidden_states if self.is_last_pp_rank else manager.intermediate_tensors
        return found[: desc.num_tokens]


class _TappedModelGraphs(ModelCudaGraphManager, TappedGraphs):
    """vLLM's manager of a model's graphs, whose base is the one above."""

    def capture(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.tracewire_model = model
        return super().capture(model, *args, **kwargs)


def _forward(create_forward_fn: Callable[..., Any], desc: Any) -> Callable[..., Any]:
    """The function that runs the model for a batch, as vLLM makes it for a capture."""
    made = create_forward_fn(desc, warmup=False)
    forward: Callable[..., Any] = made[0] if isinstance(made, tuple) else made
    return forward


@contextmanager
def _noted_inputs(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The tensors that a model is called with while the context lasts."""
    found: list[torch.Tensor] = []

    def note(_: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        found[:] = inputs_in(positional, named)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def tap_graphs(manager: Any, serving: TapServing) -> None:
    """Have a manager that has captured nothing yet capture graphs with taps."""
    manager.__class__ = _TappedModelGraphs
    manager.tracewire_serving, manager.tracewire_bare = serving, {}
    manager.tracewire_whole, manager.tracewire_inputs = {}, {}


def untapped(manager: Any) -> list[str]:
    """Descriptions of the graphs of a manager that have no tap, but for the bare ones."""
    found = [f"{type(manager).__name__}: {desc}" for desc, graph in manager.graphs.items() if not has_tap(graph)]
    return found + without_taps(getattr(manager, "breakable_cg_runner", None))
