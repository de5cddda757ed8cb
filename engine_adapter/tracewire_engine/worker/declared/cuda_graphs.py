"""Taps in vLLM's CUDA graphs: that every graph which serves requests has them.

A replayed graph runs no Python. nnsight serves the locations that `--tap` names there by vLLM's *breakable* graphs:
while one is captured, each tap is entered between two of its segments. vLLM's versions differ in which are breakable:

- up to 0.29 one wrapper around the model captures whatever is captured;
- from 0.30 on that wrapper captures graphs of the mode PIECEWISE only, and stands in a wrapper of its own for FULL
  ones, by which requests that generate are computed. That one makes plain graphs, in which no tap has a place.

There the outer wrapper is replaced by a breakable one. Whatever a version does, a graph without any tap is found out
before the engine serves: it would answer every request and leave out every intervention, without an error.
"""

from __future__ import annotations

from typing import Any

__all__ = ["breakable_throughout", "current_capture", "without_taps"]

#: What a capture is marked with that has a tap.
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
    """vLLM's breakable capture under way, or `None`; it counts as one that has a tap from now on."""
    from nnsight.modeling.vllm.interleaver import _capture

    capture = _capture()
    if capture is not None:
        setattr(capture, _MARK, True)
    return capture


def without_taps(model: Any) -> list[str]:
    """Which of the graphs that vLLM has captured around its model have no tap, each in a few words."""
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
