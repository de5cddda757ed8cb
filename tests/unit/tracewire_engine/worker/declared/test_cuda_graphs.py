"""Taps in CUDA graphs: a graph that serves requests without them is found. (The graphs themselves need a GPU.)"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.forward_context import BatchDescriptor

from tracewire_engine.worker.declared.cuda_graphs import breakable_throughout, without_taps
from tracewire_engine.worker.declared.hooks import DeclaredInterleaver
from tracewire_engine.worker.declared.plan import DeclaredRequests
from tracewire_engine.worker.declared.tap_buffers import TapBuffers
from tracewire_engine.worker.declared.tap_rows import serve_rows

TAP = "model.model.layers.2.output"
#: What tells graphs of several sizes apart, as vLLM has it.
BATCH = BatchDescriptor(num_tokens=4)


class Graph:
    """In place of `torch.cuda.CUDAGraph`: captures and replays nothing."""

    def capture_begin(self, *_: Any, **__: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class Served:
    """A model that hands its tap's value to the interleaver, wrapped as the installed vLLM wraps its own.

    Up to 0.29, one breakable wrapper captures all graphs. From 0.30 on, it captures those of the mode PIECEWISE, and
    a plain wrapper around it those of FULL.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm import forward_context
        from vllm.compilation import breakable_cudagraph, cuda_graph
        from vllm.config import CUDAGraphMode

        self.mode = CUDAGraphMode
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        platform = mock.Mock()
        for module in (breakable_cudagraph, cuda_graph):
            monkeypatch.setattr(module, "current_platform", platform)
            monkeypatch.setattr(module, "validate_cudagraph_capturing_enabled", lambda: None)
            monkeypatch.setattr(module, "get_offloader", mock.Mock())
            # Versions of vLLM up to 0.31 have none.
            monkeypatch.setattr(module, "capture_pool", lambda *_: nullcontext(), raising=False)
        for module in (breakable_cudagraph, cuda_graph, forward_context):
            monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
            monkeypatch.setattr(module, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(torch.cuda, "graph", mock.MagicMock())
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(breakable_cudagraph, "weak_ref_tensors", lambda value: value)
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda value: value)
        self.config = mock.Mock()
        self.interleaver = interleaver = object.__new__(DeclaredInterleaver)
        DeclaredInterleaver.__init__(interleaver, taps=[TAP])
        declared = DeclaredRequests(torch.device("cpu"))
        DeclaredInterleaver.install(interleaver, declared, torch.nn.Module())
        interleaver.interleaving = True
        monkeypatch.setattr(interleaver, "replay", lambda location, live: self.replayed.append(location))
        self.replayed: list[str] = []

        def forward(value: torch.Tensor) -> torch.Tensor:
            return interleaver.handle(TAP, value)

        breakable: Any = breakable_cudagraph.BreakableCUDAGraphWrapper
        #: Whether vLLM wraps the FULL graphs in a wrapper of their own, which is plain.
        self.plain = "runtime_mode" in inspect.signature(breakable).parameters
        if self.plain:
            piecewise = breakable(forward, self.config, runtime_mode=CUDAGraphMode.PIECEWISE)
            self.model: Any = cuda_graph.CUDAGraphWrapper(piecewise, self.config, runtime_mode=CUDAGraphMode.FULL)
        else:
            self.model = breakable(forward, self.config)

    def run(self, mode: Any, batch: BatchDescriptor = BATCH) -> None:
        self.context = SimpleNamespace(
            batch_descriptor=batch, cudagraph_runtime_mode=mode, remove_padding=False, all_moe_layers=None
        )
        self.model(torch.zeros(batch.num_tokens, 8))


def test_requests_that_generate_come_by_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    served.model = breakable_throughout(served.model, served.config, served.interleaver)
    # A block waits.
    served.interleaver.busy = True
    for mode in (served.mode.FULL, served.mode.PIECEWISE):
        served.run(mode)
        # Entered while it was captured; then once in each replay.
        entered = len(served.replayed)
        served.run(mode)
        assert len(served.replayed) == entered + 1
    assert without_taps(served.model) == []


def test_a_graph_without_a_tap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    served.run(served.mode.PIECEWISE)
    assert without_taps(served.model) == []
    served.run(served.mode.FULL)
    plain = [f"CUDAGraphWrapper: {BATCH}"] if served.plain else []
    assert without_taps(served.model) == plain
    served.interleaver.taps = frozenset()
    larger = BatchDescriptor(num_tokens=8)
    served.run(served.mode.PIECEWISE, larger)
    assert without_taps(served.model) == [*plain, f"BreakableCUDAGraphWrapper: {larger}"]


def test_a_step_replays_the_graph_that_its_interventions_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    declared = served.interleaver.declared
    declared.buffers = TapBuffers([TAP], 4, 8, torch.float32, torch.device("cpu"), serve_rows)
    served.interleaver.batcher = SimpleNamespace(total=4)
    declared.proof._left.clear()
    launched = mock.Mock(wraps=declared.buffers.launch)
    monkeypatch.setattr(declared.buffers, "launch", launched)
    served.model = breakable_throughout(served.model, served.config, served.interleaver)
    served.run(served.mode.FULL)
    assert without_taps(served.model) == []
    # Captured with the kernel, and no break: one graph, and nothing behind it.
    (whole,) = served.model.whole.entries.values()
    (bare,) = served.model.bare.entries.values()
    assert (len(whole.capture.segments), len(bare.capture.segments), launched.call_count) == (1, 1, 1)
    ran: list[str] = []
    for name in ("whole", "bare"):
        noting = mock.Mock(side_effect=partial(_noted, ran, name), entries=getattr(served.model, name).entries)
        monkeypatch.setattr(served.model, name, noting)
    fits = [True]
    monkeypatch.setattr(declared, "fits_buffers", lambda tokens: fits[0])
    monkeypatch.setattr(declared, "run_both", lambda graphs, total: (graphs.whole(), graphs.broken()))

    def step() -> tuple[list[str], int]:
        """Which graphs without breaks ran, and how often a tap was reached in another."""
        ran.clear()
        entered = len(served.replayed)
        served.run(served.mode.FULL)
        return [*ran], len(served.replayed) - entered

    # Neither interventions nor blocks.
    assert step() == (["bare"], 0)
    declared.hooks = {TAP: mock.Mock()}
    assert step() == (["whole"], 0)
    # Until it is proven, by both.
    declared.unproven = frozenset(("reads",))
    assert step() == (["whole"], 1)
    declared.unproven = frozenset()
    # Other ranks need another one in this step. Without an intervention on any rank, none of them is asked.
    ranks = served.interleaver.ranks = mock.Mock(traced=True)
    needs, asked = ["bare", "whole", "both", "broken"], ranks.greatest
    for theirs, ran_by in (("bare", (["whole"], 0)), ("both", (["whole"], 1)), ("broken", ([], 1))):
        asked.side_effect = partial(max, needs.index(theirs))
        assert step() == ran_by
    declared.hooks = {}
    for theirs, ran_by in (("whole", (["whole"], 0)), ("both", (["whole"], 1)), ("bare", (["bare"], 0))):
        asked.side_effect = partial(max, needs.index(theirs))
        assert step() == ran_by
    assert asked.call_count == 6
    ranks.traced = False
    assert step() == (["bare"], 0)
    assert asked.call_count == 6
    declared.hooks = {TAP: mock.Mock()}
    # The step's interventions do not fit, or a block waits: the graph breaks.
    fits[0] = False
    assert step() == ([], 1)
    served.interleaver.busy = True
    declared.hooks = {}
    assert step() == ([], 1)
    # In a step that vLLM makes up nothing is served.
    served.interleaver.busy, served.interleaver.interleaving = False, False
    declared.hooks = {TAP: mock.Mock()}
    ranks.traced = True
    assert step() == (["bare"], 0)
    assert asked.call_count == 6
    assert launched.call_count == 1


def _noted(ran: list[str], name: str, *_: Any) -> None:
    ran.append(name)


def test_a_graph_of_more_tokens_than_the_buffers_have_rows_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few of its tokens are of the step: there are no kernels in it."""
    served = Served(monkeypatch)
    declared = served.interleaver.declared
    declared.buffers = TapBuffers([TAP], 4, 8, torch.float32, torch.device("cpu"), serve_rows)
    asked = []
    declared.hooks = {TAP: mock.Mock()}
    monkeypatch.setattr(declared, "fits_buffers", lambda tokens: asked.append(tokens))
    served.model = breakable_throughout(served.model, served.config, served.interleaver)
    for _ in range(2):
        served.run(served.mode.FULL)
    assert asked == [4]


def test_a_whole_graph_without_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    served.interleaver.declared.buffers = TapBuffers([TAP], 4, 8, torch.float32, torch.device("cpu"), serve_rows)
    served.model = breakable_throughout(served.model, served.config, served.interleaver)
    served.interleaver.taps = frozenset()
    served.run(served.mode.FULL)
    assert without_taps(served.model) == [f"BreakableCUDAGraphWrapper: {BATCH}", f"TappedGraphs: {BATCH}"]


def test_without_the_kernel_there_is_no_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    served.model = breakable_throughout(served.model, served.config, served.interleaver)
    served.run(served.mode.FULL)
    assert served.model.whole.entries == {}
    assert list(served.model.bare.entries) == [BATCH]
    assert without_taps(served.model) == []
