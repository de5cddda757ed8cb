"""Which graphs of a manager lack taps, and which one a step replays. `gpu_second_runner.py` captures real ones."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import tracewire_engine  # noqa: F401 (before nnsight)
from tracewire_engine.worker.declared.managed_graphs import _noted_inputs, tap_graphs, untapped


def test_a_graph_without_a_tap_is_named() -> None:
    tapped = SimpleNamespace(tracewire_tapped=True)
    manager = SimpleNamespace(graphs={"8 tokens": tapped, "16 tokens": SimpleNamespace()}, breakable_cg_runner=None)
    assert untapped(manager) == ["SimpleNamespace: 16 tokens"]
    runner = SimpleNamespace(entries={"32 tokens": SimpleNamespace(capture=object())})
    manager = SimpleNamespace(graphs={"8 tokens": tapped}, breakable_cg_runner=runner)
    assert untapped(manager) == ["SimpleNamespace: 32 tokens"]


def test_a_manager_keeps_what_vllm_gave_it_and_captures_more_graphs() -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    manager = object.__new__(ModelCudaGraphManager)
    manager.graphs = {}
    serving = SimpleNamespace(has_kernels=False)
    tap_graphs(manager, serving)
    assert isinstance(manager, ModelCudaGraphManager)
    # What vLLM's class of models calls by `super()` is ours, and ours calls vLLM's base.
    kinds = type(manager).__mro__
    between = kinds[kinds.index(ModelCudaGraphManager) + 1]
    assert between.__name__ == "TappedGraphs"
    assert kinds[kinds.index(between) + 1] is CudaGraphManager
    assert {"capture", "run_fullgraph"} <= vars(between).keys()


def test_a_step_runs_by_the_graph_that_it_fits(monkeypatch) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    said = []
    manager = object.__new__(cudagraph_utils.ModelCudaGraphManager)
    desc = SimpleNamespace(num_tokens=2)
    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "run_fullgraph", lambda self, desc: said.append("broken"))
    kinds = {2: "whole"}
    serving = SimpleNamespace(graphs_for=kinds.__getitem__)
    tap_graphs(manager, serving)
    manager.tracewire_inputs = _Any(["given"])
    manager.tracewire_bare = _Any(SimpleNamespace(replay=lambda: said.append("bare")))
    manager.tracewire_whole = _Any(SimpleNamespace(replay=lambda: said.append("whole")))
    manager.is_last_pp_rank, manager.hidden_states, manager.use_aux_hidden_state_outputs = True, [1, 2, 3], False
    assert manager.run_fullgraph(desc) == [1, 2]
    for kinds[2] in ("broken", "bare"):
        assert manager.run_fullgraph(desc) == [1, 2]
    # Until the whole one is proven, a step runs by both, and the one that breaks is the last.
    kinds[2] = "both"
    serving.run_both = lambda graphs: (graphs.whole(), graphs.broken(), said.append(graphs.inputs()))
    manager.run_fullgraph(desc)
    assert said.pop() == ["given"]
    assert said == ["whole", "broken", "bare", "whole", "broken"]


class _Any:
    """A mapping that has one value under every key."""

    def __init__(self, value) -> None:
        self.value = value

    def __getitem__(self, key):
        return self.value


def test_what_a_model_is_given_is_noted_while_its_graph_is_captured() -> None:
    model, given = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with _noted_inputs(model) as found:
        model(torch.zeros(1, 2))
        model(input=given)
    model(torch.zeros(1, 2))
    assert len(found) == 1
    assert found[0] is given
