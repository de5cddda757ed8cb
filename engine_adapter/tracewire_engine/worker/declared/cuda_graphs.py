"""Makes sure that every CUDA graph of vLLM which serves requests has the taps.

A replayed graph runs no Python. There nnsight serves the locations that `--tap` names by vLLM's *breakable* graphs: the
capture puts each tap between two segments of the graph. Versions of vLLM differ in the graphs that are breakable:

- Up to 0.29, one breakable wrapper around the model captures all graphs.
- From 0.30 on, that wrapper captures graphs of the mode PIECEWISE only. A second wrapper around it captures FULL
  graphs, which compute the requests that generate. Those graphs are plain, so they have no place for taps.

With any version, the worker replaces the wrapper of FULL graphs by one that captures several graphs of each batch size:

- The *bare* one is vLLM's own, without a tap. Steps without blocks and without interventions replay it.
- The *broken* one breaks at the taps.
- The *whole* one does not break. Kernels serve its taps (`tap_buffers.py`). Steps replay it whose interventions fit.
  An engine runs its first such steps by this one and by the broken one, and compares (`graph_proof.py`).

The worker looks for other graphs without a tap before the engine serves: such a graph would answer requests without
interventions and without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Literal, Protocol

from .graph_proof import BothGraphs, inputs_in

__all__ = [
    "GraphKind",
    "StepGraphs",
    "TapServing",
    "breakable_throughout",
    "current_capture",
    "has_tap",
    "without_taps",
]

#: The attribute that marks a capture with a tap.
_MARK = "tracewire_tapped"


#: What a graph has at the taps: nothing, kernels, or breaks.
GraphKind = Literal["bare", "whole", "broken"]
#: The graphs that a step runs: one of these, or the whole one and the broken one (`"both"`), which are compared.
StepGraphs = Literal["bare", "whole", "both", "broken"]


class TapServing(Protocol):
    """What decides between the graphs: the interleaver."""

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can serve the taps of whole graphs on this engine."""
        ...

    def capturing(self, kind: GraphKind) -> AbstractContextManager[None]:
        """Have the graphs that are captured meanwhile be of a kind."""
        ...

    def graphs_for(self, tokens: int) -> StepGraphs:
        """Which graphs of so many tokens, padding included, the step under way runs."""
        ...

    def run_both(self, graphs: BothGraphs) -> Any:
        """Run a step by the whole graph and by the broken one. Returns the output that counts."""
        ...


@cache
def _tapped_graphs() -> Callable[..., Any]:
    """The class of the wrapper that captures several graphs of each batch size."""
    from vllm import forward_context
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    class TappedGraphs(BreakableCUDAGraphWrapper):
        """vLLM's wrapper, whose FULL graphs break at the taps; and beside it two wrappers whose graphs do not."""

        def __init__(self, runnable: Any, vllm_config: Any, serving: TapServing, **mode: Any) -> None:
            super().__init__(runnable, vllm_config, **mode)
            self._serving = serving
            self.bare = BreakableCUDAGraphWrapper(runnable, vllm_config, **mode)
            self.whole = BreakableCUDAGraphWrapper(runnable, vllm_config, **mode)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            serving, broken = self._serving, partial(super().__call__, *args, **kwargs)
            if not forward_context.is_forward_context_available():
                return broken()
            context = forward_context.get_forward_context()
            if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
                return broken()
            if context.batch_descriptor not in self.bare.entries:
                output = broken()
                with serving.capturing("bare"):
                    self.bare(*args, **kwargs)
                if serving.has_kernels:
                    with serving.capturing("whole"):
                        self.whole(*args, **kwargs)
                return output
            graphs = serving.graphs_for(context.batch_descriptor.num_tokens)
            if graphs == "bare":
                return self.bare(*args, **kwargs)
            if graphs == "whole":
                return self.whole(*args, **kwargs)
            if graphs == "both":
                whole, inputs = partial(self.whole, *args, **kwargs), partial(inputs_in, args, kwargs)
                return serving.run_both(BothGraphs(whole, broken, inputs))
            return broken()

    return TappedGraphs


def breakable_throughout(model: Any, vllm_config: Any, serving: TapServing) -> Any:
    """vLLM's wrapped model, with the wrapper of FULL graphs replaced by one whose graphs have taps where they need."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    if isinstance(model, CUDAGraphWrapper):
        if model.runtime_mode != CUDAGraphMode.FULL:
            return model
        CUDAGraphWrapper._all_instances.discard(model)
        return _tapped_graphs()(model.runnable, vllm_config, serving, runtime_mode=CUDAGraphMode.FULL)
    if isinstance(model, BreakableCUDAGraphWrapper) and getattr(model, "runtime_mode", None) is None:
        BreakableCUDAGraphWrapper._all_instances.discard(model)
        return _tapped_graphs()(model.runnable, vllm_config, serving)
    return model


def current_capture() -> Any:
    """vLLM's breakable capture under way, or `None`. Marks the capture as one that has a tap."""
    from nnsight.modeling.vllm.interleaver import _capture

    capture = _capture()
    if capture is not None:
        setattr(capture, _MARK, True)
    return capture


def has_tap(capture: Any) -> bool:
    """Whether a capture of vLLM has a tap."""
    return hasattr(capture, _MARK)


def without_taps(model: Any) -> list[str]:
    """Descriptions of the graphs without a tap that vLLM has captured around its model, but for the bare ones."""
    found: list[str] = []
    while model is not None:
        wrapper = vars(model)
        if "whole" in wrapper:
            found += without_taps(wrapper["whole"])
        for batch, entry in wrapper.get("entries", {}).items():
            if entry.capture is not None and not has_tap(entry.capture):
                found.append(f"{type(model).__name__}: {batch}")
        for batch, entry in wrapper.get("concrete_cudagraph_entries", {}).items():
            if entry.cudagraph is not None:
                found.append(f"{type(model).__name__}: {batch}")
        model = wrapper.get("runnable")
    return found
