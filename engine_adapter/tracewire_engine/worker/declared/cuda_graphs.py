"""Makes sure that every CUDA graph of vLLM which serves requests has the taps.

A replayed graph runs no Python. There nnsight serves the locations that `--tap` names by vLLM's *breakable* graphs: the
capture puts each tap between two segments of the graph. Versions of vLLM differ in the graphs that are breakable:

- Up to 0.29, one breakable wrapper around the model captures all graphs.
- From 0.30 on, that wrapper captures graphs of the mode PIECEWISE only. A second wrapper around it captures FULL
  graphs, which compute the requests that generate. Those graphs are plain, so they have no place for taps.

From 0.30 on, the worker therefore replaces the outer wrapper by a breakable one. With any version, it looks for
graphs without a tap before the engine serves: such a graph would answer requests without interventions and without an
error.
"""

from __future__ import annotations

from typing import Any

__all__ = ["breakable_throughout", "current_capture", "without_taps"]

#: The attribute that marks a capture with a tap.
_MARK = "tracewire_tapped"


def breakable_throughout(model: Any, vllm_config: Any) -> Any:
    """vLLM's wrapped model, with the wrapper of FULL graphs replaced by one whose graphs have room for taps."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config import CUDAGraphMode

    if not isinstance(model, CUDAGraphWrapper) or model.runtime_mode != CUDAGraphMode.FULL:
        return model
    CUDAGraphWrapper._all_instances.discard(model)
    return BreakableCUDAGraphWrapper(model.runnable, vllm_config, runtime_mode=CUDAGraphMode.FULL)


def current_capture() -> Any:
    """vLLM's breakable capture under way, or `None`. Marks the capture as one that has a tap."""
    from nnsight.modeling.vllm.interleaver import _capture

    capture = _capture()
    if capture is not None:
        setattr(capture, _MARK, True)
    return capture


def without_taps(model: Any) -> list[str]:
    """Descriptions of the graphs without a tap that vLLM has captured around its model."""
    found: list[str] = []
    while model is not None:
        wrapper = vars(model)
        for batch, entry in wrapper.get("entries", {}).items():
            if entry.capture is not None and not hasattr(entry.capture, _MARK):
                found.append(f"{type(model).__name__}: {batch}")
        for batch, entry in wrapper.get("concrete_cudagraph_entries", {}).items():
            if entry.cudagraph is not None:
                found.append(f"{type(model).__name__}: {batch}")
        model = wrapper.get("runnable")
    return found
