"""Kernels recorded as a CUDA graph. One launch of all of them costs about as much as a launch of one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["KernelRecorder", "RecordedKernels"]

logger = logging.getLogger("vllm.tracewire")


class RecordedKernels:
    """A recorded sequence of kernels. It reads and writes the memory that it was recorded with."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        """Launch the kernels on the current stream."""
        self._graph.replay()


class KernelRecorder:
    """Records kernels on one device, with memory of its own: vLLM's graphs overwrite the free memory of their pool."""

    def __init__(self, device: torch.device) -> None:
        self._works = device.type == "cuda" and torch.version.cuda is not None
        self._stream: Any = None
        self._pool: Any = None
        #: A graph that is kept for ever: the pool must always have one.
        self._first: torch.cuda.CUDAGraph | None = None
        self._device = device

    def record(self, launch: Callable[[], object]) -> RecordedKernels | None:
        """Record the kernels that `launch` launches, without running them. `None` if they cannot be recorded."""
        if not self._works:
            return None
        try:
            if self._first is None:
                self._stream = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
                self._first = self._captured(lambda: torch.zeros(1, device=self._device))
            return RecordedKernels(self._captured(launch))
        except Exception:
            logger.exception("declared interventions could not be recorded as a CUDA graph; they run without one")
            self._works = False
            return None

    def _captured(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # The capture leaves out the work of other threads on the device.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph
